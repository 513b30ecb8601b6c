"""A recorded run of simulated NPUs, computed again: for any machine, and with what tasks take from each other."""
