"""A rank that saves alone: an error ends its wait, naming the call, the ranks in it, and where the others are."""

from __future__ import annotations

import functools
import re
from datetime import timedelta

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
from endings import of_launcher
from ranks import run_on_ranks

RANKS = 3


def alone_in_calls() -> None:
    """Each case in a record of its own."""
    from ds_npu.engine.failures import joint_calls
    from ds_npu.engine.failures.failure_record import FailureRecord

    joint_calls.WARN_AFTER_SECONDS, rank = 0.1, dist.get_rank()

    def case(name: str, timeout_s: float) -> joint_calls.JointCalls:
        record = FailureRecord.of_this_world()
        record.store = dist.PrefixStore(name, record.store)
        record.store.set_timeout(timedelta(seconds=timeout_s))
        return joint_calls.JointCalls(record)

    def error_of(calls: joint_calls.JointCalls, name: str) -> str:
        with pytest.raises(RuntimeError) as caught, calls.call(name):
            raise AssertionError("it was begun")
        return str(caught.value)

    calls, begun = case("all come", 60.0), []
    for number in range(3):
        with calls.call("save"), calls.call("a part of it"):
            begun.append(number)
            calls.say_where()
    assert begun == [0, 1, 2] and calls.number == 3
    dist.barrier()

    calls = case("one does not come", 3.0)
    if rank < 2:
        said = error_of(calls, "save")
        told = r"save ends, after [3-9] s, the timeout of the process group: in it are ranks 0, 1 of 3; rank 2 is at "
        assert re.match(told + r"\S+/test_joint_calls.py:\d+ in alone_in_calls: .*\. Every rank must ", said), said
    else:
        calls.record.store.wait(["joint call 1"])
        calls.say_where()  # the rank stands here
    dist.barrier()

    calls = case("one ends", 60.0)
    if rank:
        said = error_of(calls, "save")
        told = "save ends, rank 0 has ended: in it are ranks 1, 2 of 3; rank 0 is at the end of its script. "
        assert said.startswith(told), said
    else:
        calls.record.store.wait([f"place of rank {other} at joint call 1" for other in (1, 2)])
        calls._end(calls.record)
    dist.barrier()

    calls = case("two calls", 60.0)
    said = error_of(calls, "load" if rank == 2 else "save")
    told = "rank 2 calls load, where save was called first: |rank [01] calls save, where load was called first: "
    assert re.match(rf"{'load' if rank == 2 else 'save'} ends, ({told})", said), said


@pytest.mark.slow
def test_the_error_names_the_call_and_the_ranks():
    run_on_ranks(RANKS, alone_in_calls)


def rank_0_saves_alone(folder: str) -> None:
    import deepspeed

    from ds_npu.features.watch import stalls
    from ds_npu.features.watch import watches as feature

    rule.without_extension()
    feature.StallWatch = functools.partial(stalls.StallWatch, least=60.0)
    stalls.STILL_SECONDS = stalls.LOOK_EVERY_SECONDS = 0.1
    config = rule.config(1, torch.float32, {"tensor": 2}) | {"gradient_accumulation_steps": 1}
    model = tiny_models.tiny("llama", torch.float32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=2))
    ids = tiny_models.tokens(2, 9)
    saves = {
        "engine.save_checkpoint": lambda: engine.save_checkpoint(folder),
        "engine.save_16bit_model": lambda: engine.save_16bit_model(folder),
        "engine.save_pretrained": lambda: engine.save_pretrained(folder),
        "engine.whole_state_dict": engine.whole_state_dict,
        "engine.whole_weights": lambda: next(engine.whole_weights()),
    }
    for name, save in saves.items():
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError) as caught:
                save()
            said = str(caught.value)
            told = rf"{re.escape(name)} ends, after [2-9] s, the timeout of the process group: in it is rank 0 of 2; "
            assert re.match(told, said), said
            assert "rank 1 is at " in said and "in rank_0_saves_alone: " in said, said
        loss = engine(input_ids=ids, labels=ids).loss  # rank 1 waits here for rank 0
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 1:
            engine.joint_calls.number = engine.joint_calls.record.store.add("joint calls of rank 1", 1)
    dist.barrier()
    for save in saves.values():
        save()


@pytest.mark.slow
def test_a_rank_that_saves_alone(tmp_path):
    run_on_ranks(2, rank_0_saves_alone, str(tmp_path))


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=0)
@pytest.mark.parametrize("how", ["saves0", "saves1"])
def test_a_rank_that_saves_where_the_others_have_ended(how):
    alone = int(how[-1])
    text = "\n".join(of_launcher("torchrun", how))
    error = f"RuntimeError: engine.save_checkpoint ends, rank {1 - alone} has ended: in it is rank {alone} of 2; "
    assert error in text and f"rank {1 - alone} is at the end of its script" in text, text
    assert text.count("    engine.save_checkpoint(folder)\n") == 1, text
