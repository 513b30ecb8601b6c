"""Empty: TRL 0.24 takes optional packages for installed with transformers 5, and imports them."""
