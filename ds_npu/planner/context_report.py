"""The part of ``ds_npu check`` about context parallelism: the chosen algorithm, and the estimated cost of each."""

from __future__ import annotations

import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence

from ds_npu.config.check import Checked
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.config.context_parallel import ContextParallelSection, algorithms
from ds_npu.config.problems import Config
from ds_npu.planner.communicators import number_bytes
from ds_npu.planner.context_choice import Candidate, algorithm_text, choose, choose_for, estimated, refusals
from ds_npu.planner.context_cost import Layer, LayerCost
from ds_npu.planner.model_file import attention_of
from ds_npu.topology.machine import Machine

CANDIDATES_SHOWN = 12
MIB = 2**20


def context_part(ds_config: Config, checked: Checked, arguments: Namespace) -> Iterator[str]:
    """Yield lines about the choice, none without a context axis. Raises ConfigError where no algorithm is possible."""
    degrees = checked.degrees
    section = checked.config.context_parallel
    if degrees.cp == 1:
        return
    left = algorithms(section, degrees.cp)
    title = f"Context parallelism over {degrees.cp} ranks:"
    wanted = {"--model PATH": arguments.model, "--sequence-length N": arguments.sequence_length}
    if missing := [option for option, value in wanted.items() if value is None]:
        known = f"{algorithm_text(left[0])}, as given" if len(left) == 1 else "the algorithm is chosen by estimates"
        yield from ("", f"{title} {known}; to see estimates, say {' and '.join(missing)}")
        return
    layer = _layer(ds_config, checked, arguments)
    machine = arguments.machine
    choice = choose_for(section, layer, degrees, machine)
    how = f"chosen: {choice.reason}" if len(left) > 1 else "as given"
    yield from ("", f"{title} {algorithm_text(choice.algorithm)} ({how})", *_assumptions(layer, machine))
    # The table shows all algorithms, the given one among them.
    found = algorithms(ContextParallelSection(kv_cache=section.kv_cache), degrees.cp)
    every = choice if found == left else choose(estimated(found, layer, degrees, machine)) or choice
    yield from _table([each for each in every.candidates if each.cost], choice.algorithm)
    for refusal in refusals(every.candidates):
        yield from textwrap.wrap(f"Not possible: {refusal}", 116, initial_indent="    ", subsequent_indent="      ")


def planned_algorithm(ds_config: Config, checked: Checked, arguments: Namespace) -> ContextAlgorithm | None:
    """The algorithm that shares a model's sequences; None without one, and where it depends on the first batch.

    Raises ConfigError where no algorithm is possible.
    """
    degrees = checked.degrees
    section = checked.config.context_parallel
    if degrees.cp == 1:
        return None
    left = algorithms(section, degrees.cp)
    if len(left) == 1:
        return left[0]
    if arguments.model is None or arguments.sequence_length is None:
        return None
    return choose_for(section, _layer(ds_config, checked, arguments), degrees, arguments.machine).algorithm


def _layer(ds_config: Config, checked: Checked, arguments: Namespace) -> Layer:
    shape = attention_of(arguments.model)
    samples = checked.batch.micro or 1
    return Layer(shape, arguments.sequence_length, samples, number_bytes(ds_config))


def _assumptions(layer: Layer, machine: Machine) -> Iterator[str]:
    fewest, slowest = machine.attention[0]
    most, fastest = machine.attention[-1]
    speeds = [
        f"{machine.node} ranks a node, {machine.port / 1e9:.0f} GB/s to all of them together",
        f"{machine.link / 1e9:.1f} GB/s to one of them",
        f"{machine.network / 1e9:.1f} GB/s to other nodes",
        f"{machine.memory[0][1] / 1e9:,.0f} to {machine.memory[-1][1] / 1e9:,.0f} GB/s of memory, in L2 and beyond",
        f"{slowest / 1e12:.0f} to {fastest / 1e12:.0f} TFLOP/s in attention at {fewest:,} to {most:,} keys a call",
        f"{machine.kernel * 1e6:.0f} us a kernel",
        f"{machine.message * 1e6:.0f} us a message",
    ]
    size = "1 sample" if layer.samples == 1 else f"{layer.samples} samples"
    text = (
        f"Estimated, not measured: what one causal layer ({layer.shape}; {size} of {layer.length:,} tokens, "
        f"{layer.number_bytes} bytes a number) costs a rank, forward and backward. "
        f"Assumed of an {machine.name}: {', '.join(speeds)}."
    )
    yield from textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent="  ")


def _table(candidates: Sequence[Candidate], taken: ContextAlgorithm) -> Iterator[str]:
    yield f"{'':<36}    total attention  exposed  copying   MiB to   MiB to               MiB      MiB"
    yield f"{'':<36}       ms        ms  wait ms       ms the node   others messages     kept  buffers"
    for index, each in enumerate(candidates):
        if each.cost and (index < CANDIDATES_SHOWN or each.algorithm == taken):
            mark = "*" if each.algorithm == taken else " "
            yield f"  {mark} {each!s:<32}{_row(each.cost)}"
    if len(candidates) > CANDIDATES_SHOWN:
        yield f"    and {len(candidates) - CANDIDATES_SHOWN} that are slower"


def _row(cost: LayerCost) -> str:
    both = cost.both
    milliseconds = [1e3 * seconds for seconds in (cost.seconds, both.attention_s, both.exposed_s, both.copy_s)]
    times = "{:>9.2f}{:>10.2f}{:>9.2f}{:>9.2f}".format(*milliseconds)
    sent = f"{both.near_bytes / MIB:>9,.0f}{both.far_bytes / MIB:>9,.0f}{both.messages:>9}"
    return f"{times}{sent}{cost.kept_bytes / MIB:>9,.0f}{cost.working_bytes / MIB:>9,.0f}"
