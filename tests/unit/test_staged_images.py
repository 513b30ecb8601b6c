"""Models that see, in stages: the vision tower in the first, features for later blocks beside hidden states, cuts."""

from __future__ import annotations

import image_models
import pytest
import torch
from staged_models import chained, cut, labelled, stageable
from tiny_models import Float64

from ds_npu.features.pipeline.images import check_no_pixels, image_pieces
from ds_npu.features.pipeline.micro_batches import cut as cut_batch
from ds_npu.features.pipeline.stages import run_stage
from ds_npu.parallel.pipeline.pass_through import Side
from ds_npu.parallel.pipeline.transfers import MessageForm

KINDS = tuple(image_models.KINDS)


@pytest.mark.parametrize("split", [[2, 2], [1, 1, 2], [1, 0, 3], [3, 1]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_see_what_the_whole_model_does(kind, split):
    """Bitwise: loss, logits and every gradient; of Qwen3-VL also where DeepStack's features go to later stages."""
    plain, parts = image_models.seeing(kind), [image_models.seeing(kind) for _ in split]
    stages, batch = cut(parts, split), image_models.batch(kind)
    with Float64():
        expected, found = plain(**batch), chained(parts, stages, **batch)
        expected.loss.backward()
        found.loss.backward()
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.logits, expected.logits)
    mine = {name: weight.grad for part in parts for name, weight in part.named_parameters()}
    theirs = {name: weight.grad for name, weight in plain.named_parameters()}
    assert mine.keys() == theirs.keys() and any("vis" in name and each is not None for name, each in theirs.items())
    for name, gradient in theirs.items():
        assert (gradient is None) == (mine[name] is None), name
        assert gradient is None or torch.equal(mine[name], gradient), name


def test_the_vision_tower_is_in_the_first_stage():
    for kind in KINDS:
        parts = [image_models.seeing(kind) for _ in range(2)]
        stages = cut(parts, 2)
        towers = [name for name, side in stages[1].absent.items() if side is Side.INPUTS]
        assert towers and not set(towers) & stages[0].absent.keys()
        held = [[name for name, _ in part.named_parameters() if name.startswith(tuple(towers))] for part in parts]
        assert held[0] and not held[1]


def test_what_crosses_a_border_of_qwen3_vl():
    """Hidden states; where a block behind the border takes features, the mask and those, and no more."""
    crossing = {}
    for split in ([1, 3], [2, 2], [3, 1]):
        parts = [image_models.seeing("qwen3_vl") for _ in split]
        first = cut(parts, split)[0]
        leaving = run_stage(parts[0], first.stage, None, **image_models.batch("qwen3_vl"))
        crossing[split[0]] = [list(each.shape) for each in leaving]
    ids = image_models.batch("qwen3_vl")["input_ids"]
    hidden, mask, features = [*ids.shape, 32], list(ids.shape), [int((ids >= 60).sum() - (ids == 62).sum()), 32]
    assert crossing == {1: [hidden, mask, features, features], 2: [hidden, mask, features], 3: [hidden]}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_have_the_images_of_their_samples(kind, count):
    """The logits of the parts are those of the whole batch."""
    model, batch = image_models.seeing(kind), image_models.batch(kind)
    del batch["labels"]
    parts = cut_batch(batch, count, image_pieces(model, batch, count))
    assert all((part["pixel_values"] is None) == (60 not in part["input_ids"]) for part in parts)
    with Float64(), torch.no_grad():
        expected, found = model(**batch).logits, torch.cat([model(**part).logits for part in parts])
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(found[seen], expected[seen], rtol=0, atol=1e-12)


def test_images_that_belong_to_no_sample():
    model, batch = image_models.seeing("qwen2_5_vl"), image_models.batch("qwen2_5_vl")
    wrong = batch | {"image_grid_thw": torch.tensor([(1, 8, 8), (1, 4, 8)])}
    with pytest.raises(ValueError, match=r"image_grid_thw \[2, 3\] of 16, 8 tokens, and samples of 12, 0, 8, 0"):
        image_pieces(model, wrong, 4)
    with pytest.raises(ValueError, match="pixel_values are given without image_grid_thw"):
        image_pieces(model, {name: each for name, each in batch.items() if name != "image_grid_thw"}, 2)
    with pytest.raises(ValueError, match="no input_ids, which say to which sample each belongs"):
        image_pieces(model, {name: each for name, each in batch.items() if name != "input_ids"}, 2)
    llava = image_models.seeing("llava")
    with pytest.raises(ValueError, match=r"pixel_values \[3, 3, 8, 8\] of -1, -1, -1 tokens"):
        image_pieces(llava, image_models.batch("llava") | {"pixel_values": torch.zeros(3, 3, 8, 8)}, 2)


def test_inputs_that_stages_are_not_given():
    parts = [stageable("llama") for _ in range(2)]
    first, _ = cut(parts, 2)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is cut into stages, and is given pixel_values: .*"):
        run_stage(parts[0], first.stage, None, **labelled(), pixel_values=torch.zeros(1))
    parts = [image_models.seeing("qwen3_vl") for _ in range(2)]
    first, _ = cut(parts, 2)
    with pytest.raises(ValueError, match=r"is given mm_encoder_outputs: .* Accepted are pixel_values"):
        run_stage(parts[0], first.stage, None, **labelled(), mm_encoder_outputs={"image": 1})
    with pytest.raises(ValueError, match=r"given pixel_values, pixel_values_videos, and ds_npu\.parallel\.context "):
        check_no_pixels(parts[0], image_models.batch("qwen3_vl"))


def test_headers_say_what_crosses():
    values = torch.zeros(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(5, 4)
    form = MessageForm.of(values)
    assert MessageForm.read(form.header(torch.device("cpu"))) == form
    assert form.gradients == MessageForm.of((values[0], values[2]))
    with pytest.raises(ValueError, match=r"17 tensors leave a pipeline stage, among them \[5, 4\] of torch.float32"):
        MessageForm.of((values[2],) * 17)
    with pytest.raises(ValueError, match=r"\[1\] of torch.complex64; accepted are 16 of at most 6 dims"):
        MessageForm.of((torch.zeros(1, dtype=torch.complex64),))
