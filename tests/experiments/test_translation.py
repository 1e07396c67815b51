from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_train import result
from test_translation_data import make_data, write_lines

from distributed.scripts import train_on_ranks
from distributed.training import trainer_for
from nlp.token_rows import IGNORED
from nlp.translation import TranslationModule
from nlp.translation_data import BOS, EOS, PAD
from nlp.translation_model import EncoderDecoder, translate_greedily

SOURCE = torch.tensor(
    [[5, 6, 7, EOS, PAD, PAD], [8, EOS, PAD, PAD, PAD, PAD], [5, 6, 7, 8, 9, EOS]]
)
TARGET_IN = torch.tensor([[BOS, 9, 8, 7, PAD], [BOS, 9, PAD, PAD, PAD], [BOS, 5, 6, 7, 8]])
TARGETS = torch.tensor(
    [[9, 8, 7, EOS, IGNORED], [9, EOS, IGNORED, IGNORED, IGNORED], [5, 6, 7, 8, EOS]]
)


def make_network() -> EncoderDecoder:
    torch.manual_seed(0)
    return EncoderDecoder(12, 6, 5, num_layers=2, width=16, num_heads=2).eval()


def test_the_decoder_does_not_look_ahead() -> None:
    network = make_network()
    changed = TARGET_IN.clone()
    changed[:, 3] = 10
    before, after = (
        network(SOURCE, source=SOURCE, target_in=target_in) for target_in in (TARGET_IN, changed)
    )
    assert before.shape == (3, 5, 12)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3])


def test_the_encoder_looks_both_ways_and_the_padding_is_not_seen() -> None:
    network = make_network()
    memory = network.encoder(SOURCE)
    for position, seen in ((2, True), (4, False)):
        changed = SOURCE.clone()
        changed[0, position] = 10 if seen else PAD
        if not seen:
            # Whatever the padding is embedded as, the tokens do not see it.
            network.encoder.embedding.tokens.weight.data[PAD] += 1
            network.encoder.embedding.positions.weight.data[4] += 1
        again = network.encoder(changed)
        assert torch.allclose(memory[0, :2], again[0, :2], atol=1e-6) != seen
    # The decoder does not look at the memory of padding either.
    noisy = memory + torch.randn_like(memory) * (SOURCE == PAD)[..., None]
    torch.testing.assert_close(
        network.decoder(memory, SOURCE, TARGET_IN), network.decoder(noisy, SOURCE, TARGET_IN)
    )
    assert not torch.allclose(
        network.decoder(memory, SOURCE, TARGET_IN)[0],
        network.decoder(-memory, SOURCE, TARGET_IN)[0],
    )


def test_the_loss_and_its_gradient_ignore_padding() -> None:
    module = TranslationModule(1, 16, 2, vocabulary_size=12, source_length=6, target_length=5)
    batch = {"source": SOURCE, "target_in": TARGET_IN, "targets": TARGETS}
    figures, count = module.figures(batch)
    assert count == 11
    figures["loss"].backward()
    other = {**batch, "target_in": TARGET_IN.where(TARGETS != IGNORED, 10)}
    # A shorter source in a longer row, and rows with nothing to predict, change nothing either.
    blank = {
        "source": [[EOS] + 5 * [PAD]],
        "target_in": [[BOS] + 4 * [PAD]],
        "targets": [5 * [IGNORED]],
    }
    longer = {name: torch.cat([other[name], torch.tensor(rows)]) for name, rows in blank.items()}
    torch.testing.assert_close(module.figures(longer), (figures, count))
    padding = module.network.encoder.embedding.tokens.weight.grad[PAD]
    assert torch.equal(padding, torch.zeros(16))
    # Nothing but padding: no loss, and no division by nothing.
    nothing, count = module.figures({name: torch.tensor(rows) for name, rows in blank.items()})
    assert (nothing["loss"].item(), count) == (0.0, 0)


def test_greedy_translations_end_once() -> None:
    network = make_network()
    translations = translate_greedily(network, SOURCE, BOS, EOS, 5)
    assert translations.shape == (3, 5)
    # Taken in one go, the likeliest tokens are the same.
    read = torch.cat([torch.full((3, 1), BOS), translations[:, :-1]], dim=1)
    likeliest = network(SOURCE, source=SOURCE, target_in=read).argmax(-1)
    ended = (translations == EOS).cumsum(1) - (translations == EOS).int() > 0
    assert torch.equal(translations[~ended], likeliest[~ended])
    assert (translations[ended] == PAD).all()
    with torch.no_grad():
        network.decoder.output_norm.weight.zero_()
        network.decoder.output_norm.bias.copy_(100 * network.decoder.output.weight[EOS])
    assert translate_greedily(network, SOURCE, BOS, EOS, 5).tolist() == 3 * [
        [EOS, PAD, PAD, PAD, PAD]
    ]


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.num_heads=3 must divide model\.width=16"):
        TranslationModule(width=16, num_heads=3)
    with pytest.raises(ValueError, match=r"model\.translate_examples=-1"):
        TranslationModule(translate_examples=-1)
    with pytest.raises(
        ValueError, match=r"model\.split\.pieces=4: .*encoder and decoder.*strategy\.stages=2"
    ):
        TranslationModule(split={"pieces": 4})


def test_it_learns_to_read_numbers_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = make_data(tmp_path, batch_size=16, target_length=8)
    module = TranslationModule(1, 32, 2, warmup_steps=5, learning_rate=1e-2, translate_examples=12)
    saver = ModelCheckpoint(tmp_path / "saved", filename="end")
    settings = {
        "max_steps": 120,
        "max_epochs": -1,
        "limit_val_batches": 0,
        "enable_checkpointing": True,
    }
    trainer = trainer_for("auto", callbacks=[saver], **settings)
    trainer.fit(module, datamodule=data)
    (scores,) = trainer.test(module, datamodule=data, verbose=False)
    assert scores["test/loss"] < 0.2
    assert scores["test/chrf"] > 0.8
    assert scores["test/copied_chrf"] < 0.1
    # A checkpoint knows the sizes.
    loaded = TranslationModule.load_from_checkpoint(tmp_path / "saved" / "end.ckpt").eval()
    source = next(iter(data.test_dataloader()))["source"]
    assert torch.equal(loaded.translate(source), module.eval().translate(source))


def test_a_split_point_stands_between_encoder_and_decoder() -> None:
    torch.manual_seed(0)
    dense = {
        "kind": "threshold",
        "density": 1.0,
        "forward_format": "fp32",
        "backward_format": "fp32",
    }
    whole = EncoderDecoder(12, 6, 5, num_layers=1, width=16, num_heads=2).eval()
    cut = EncoderDecoder(
        12, 6, 5, num_layers=1, width=16, num_heads=2, pieces=2, split=dense
    ).eval()
    assert [name for name, _ in cut.named_children()] == ["encoder", "split", "decoder"]
    cut.load_state_dict(whole.state_dict(), strict=False)
    assert torch.equal(
        whole(SOURCE, source=SOURCE, target_in=TARGET_IN),
        cut(SOURCE, source=SOURCE, target_in=TARGET_IN),
    )
    # What is translated has gone through the split point as well.
    torch.nn.init.ones_(whole.encoder.output_norm.bias)
    split = {"kind": "threshold", "density": 0.25}
    sparse = EncoderDecoder(
        12, 6, 5, num_layers=1, width=16, num_heads=2, pieces=2, split=split
    ).train()
    sparse.load_state_dict(whole.state_dict(), strict=False)
    assert (sparse.remember(SOURCE) != 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert (whole.remember(SOURCE) != 0).all()
    known = EncoderDecoder(
        12, 6, 5, num_layers=1, width=16, num_heads=2, pieces=2, split={"density": 0.25}
    ).eval()
    assert [name for name, _ in known.named_children()] == [
        "encoder",
        "split_encoder",
        "split",
        "split_decoder",
        "decoder",
    ]
    remembered = known.decoder(known.remember(SOURCE), SOURCE, TARGET_IN)
    assert torch.equal(known(SOURCE, source=SOURCE, target_in=TARGET_IN, tokens=SOURCE), remembered)


def test_the_command_trains_encoder_and_decoder_on_two_stages(ranks: Any, tmp_path: Path) -> None:
    files = write_lines(tmp_path)
    printed = train_on_ranks(
        ranks, tmp_path, "experiment=translation", "strategy=dct_pipeline", "trainer.max_steps=6",
        "trainer.val_check_interval=3", *(f"data.{setting}={file}" for setting, file in files.items()),
        "data.vocabulary_size=300", "data.batch_size=8", "data.eval_batch_size=8", "model.width=32",
        "model.num_layers=1",
    )  # fmt: skip
    assert "before the ``update`` method" not in printed
    figures = result(tmp_path)
    assert figures["steps"] == 6
    assert figures["split_ratio"] > 8
    assert {"val/loss", "test/loss", "test/chrf", "test/copied_chrf"} <= set(figures["metrics"])
