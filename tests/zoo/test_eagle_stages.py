"""The stages of `flotilla zoo eagle`: the target writes, the layer learns, what it learned is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.eagle_config import check_eagle_target, feature_layers, read_eagle_config
from tests.zoo import written_answers
from zoo import eagle, eagle_data, eagle_evaluate, eagle_save, models
from zoo.eagle_model import EagleModel
from zoo.heads_evaluate import accepted_by_layers
from zoo.registry import TARGET, weights_dir
from zoo.scored import Scored


def test_a_layer_is_trained_on_what_the_target_wrote(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    target = written_answers.small_target(directory)
    answers = written_answers.write(target, tmp_path)

    batch = next(eagle_data.batches(Scored.load([tmp_path / "generated-0.npz"]), 3, seed=0))
    drafted = batch.ids.flatten()[batch.where + 2]
    # A greedy answer is the target's most probable tokens; the first of each is not drafted.
    np.testing.assert_array_equal(drafted, batch.top_ids[:, 0])
    assert len(drafted) == sum(len(answer) - 1 for _, answer in answers)

    trained = eagle.train(directory, tmp_path, tmp_path / "run", minutes=0.01)
    check_eagle_target(read_eagle_config(trained), directory)
    found = eagle_save.load(trained, EagleModel(target.config))
    assert bool(found.midlayer.mlp.up_proj.weight.any())
    ids, answer = answers[0]
    right = eagle_evaluate.follow(target, found, ids, answer)
    assert right.shape == (eagle_evaluate.CHAIN, len(answer))
    assert not right[:, -1].any()
    assert sum(accepted_by_layers(right)) <= len(answer) - 1


def test_a_layer_reads_its_own_output_where_a_draft_goes_on() -> None:
    """The training-time test is what drafting a token at a time computes."""
    torch.manual_seed(0)
    target = models.load(weights_dir(TARGET))
    model = EagleModel(target.config)
    text = torch.tensor([[1, 40, 7, 99, 250, 31, 8, 77, 1000]])
    read = eagle_data.features(target, text, feature_layers(target.config.num_hidden_layers))
    embeds = target.model.embed_tokens(text.roll(-1, 1))
    with torch.no_grad():
        whole = model(read, embeds, 3)
        # Positions from 6 on have no features, as if the target had read six tokens: nothing depends on them.
        known = read.clone()
        known[:, 6:] = 1e3
        cut = model(known, embeds, 3)
    torch.testing.assert_close(cut[0][:, 5], whole[0][:, 5])
    torch.testing.assert_close(cut[1][:, 6], whole[1][:, 6])
    torch.testing.assert_close(cut[2][:, 7], whole[2][:, 7])
    assert not torch.equal(whole[1][:, 6], whole[0][:, 6])
