"""Real tasks: parsers on made-up files, batches, pretrained weights where they are at hand."""

import pytest
import torch
from torch import nn

from experiments.data import DataError
from experiments.data import files as data_files
from experiments.lab.problem import trajectory
from experiments.lab.trainer import Trainer, outputs
from experiments.tasks import texts
from experiments.tasks.models import tiny_encoder
from experiments.tasks.scores import f1, negative_loss, r_squared
from experiments.tasks.table import TASKS


def made_up(*lengths, pad=0):
    rows = [list(range(1, length + 1)) for length in lengths]
    return texts.texts(rows, torch.arange(len(lengths)), pad)


def test_a_sentence_keeps_its_quotes_and_a_pair_loses_the_byte_order_mark():
    sentences, labels = texts.sst2_sentences(b'sentence\tlabel\nnot "bad \t1\nbad\t0\n')
    assert sentences == ['not "bad', "bad"]
    assert labels.tolist() == [1, 0]
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    content = f'\ufeff{header}1\t7\t8\tHe said "so .\tSo he said .'.encode()
    pairs, same = texts.mrpc_pairs(content)
    assert pairs == [('He said "so .', "So he said .")]
    assert same.tolist() == [1]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"label\tsentence\n1\tgood\n", "begins with"),
        (b"sentence\tlabel\ngood\t1\ncut\n", "line 3: 1 cells"),
    ],
)
def test_another_table_is_an_error_that_names_the_line(content, told):
    with pytest.raises(DataError, match=told):
        texts.sst2_sentences(content, "dev.tsv")


def test_a_reaction_is_split_into_atoms_and_ends_with_a_separator():
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "C", "Cl", "[Na+]", ">>", "(", ")", "=", "O", "%12"]
    (row,) = texts.reaction_tokens(["CC(=O)Cl>>[Na+]%12"], vocabulary)
    parts = [vocabulary[place] for place in row]
    assert parts == ["[CLS]", "C", "C", "(", "=", "O", ")", "Cl", ">>", "[Na+]", "%12", "[SEP]"]
    with pytest.raises(DataError, match="no token of SMILES"):
        texts.split_smiles("C!")
    with pytest.raises(DataError, match="no token 'N'"):
        texts.reaction_tokens(["N"], vocabulary)


def test_yields_are_read_behind_an_unnamed_column():
    reactions, wanted = texts.reaction_yields(b"\trxn\ty\n464\tCC>>C\t0.5\n3\tC>>C\t0.25\n")
    assert reactions == ["CC>>C", "C>>C"]
    assert wanted.tolist() == [0.5, 0.25]


def test_a_batch_is_padded_to_its_longest_row_and_not_further():
    made = made_up(3, 7, 5)
    x, y = made.batch(torch.tensor([0, 2]))
    assert x.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert y.tolist() == [0, 2]
    assert sorted(torch.cat([y for _, y in made.batches(2)]).tolist()) == [0, 1, 2]


def test_bucketed_batches_have_like_lengths_and_every_row_as_often():
    made = made_up(*[4 + i % 40 for i in range(200)])
    by_length, at_random = texts.drawn_by_length(made), texts.drawn_at_random(made)
    source = torch.Generator().manual_seed(0)
    drawn = [by_length(source, 8) for _ in range(2000)]
    padding = [float((x == 0).float().mean()) for x, _ in drawn]
    assert sum(padding) / len(padding) < 0.03
    assert float((at_random(source, 64)[0] == 0).float().mean()) > 0.2
    counts = torch.bincount(torch.cat([y for _, y in drawn]), minlength=200).float()
    # 80 expected for each. Samples of a batch go together, so counts spread more than Poisson's 9.
    by_tens = counts.view(5, 40).sum(1)
    assert (by_tens - 3200).abs().max() < 5 * 3200**0.5
    assert counts.min() > 80 / 3
    assert counts.max() < 80 * 2


def test_scores_are_those_of_the_definition():
    class Says(nn.Module):
        def forward(self, x):
            return x

    wanted = torch.tensor([1.0, 2.0, 3.0, 6.0])
    found = torch.tensor([1.0, 2.0, 4.0, 6.0])
    halves = [(found[:1], wanted[:1]), (found[1:], wanted[1:])]
    assert r_squared(*outputs(Says(), halves)) == pytest.approx(100 * (1 - 1 / 14))
    labels = torch.tensor([1, 1, 1, 0, 0])
    said = nn.functional.one_hot(torch.tensor([1, 1, 0, 1, 0]), 2).float()
    assert f1(said, labels) == pytest.approx(100 * 2 * 2 / (3 + 3))
    score = negative_loss(nn.functional.mse_loss)
    assert score(*outputs(Says(), halves)) == pytest.approx(-1 / 4)


def test_an_encoder_ignores_padding_and_knows_the_second_sentence():
    torch.manual_seed(0)
    model = tiny_encoder(2).eval()
    row = torch.tensor([[1, 5, 6, 2, 7, 8, 2]])
    padded = torch.cat([row, torch.zeros(1, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(model(row), model(padded))
    types = model.bert.bert.embeddings.token_type_embeddings.weight
    gradient = torch.autograd.grad(model(padded)[0, 0], types)[0]
    assert (gradient.abs().sum(1) > 0).all()
    single = torch.autograd.grad(model(row[:, :4])[0, 0], types)[0]
    assert single[1].abs().sum() == 0


def test_the_mean_of_all_tokens_leaves_padding_out():
    torch.manual_seed(0)
    model = tiny_encoder(2, mean=True).eval()
    row = torch.tensor([[1, 5, 6, 2]])
    padded = torch.cat([row, torch.zeros(1, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(model(row), model(padded))
    hidden = model.bert.bert(row).last_hidden_state
    torch.testing.assert_close(model(row), model.bert.classifier(hidden.mean(1)))


@pytest.mark.parametrize("name", TASKS)
def test_a_small_task_needs_no_file_and_trains(name, no_files):
    problem = TASKS[name].problem(small=True)
    trainer = problem.trainer(1e-2, 0, [2])
    found = trainer.train()
    assert found["diverged_epoch"] == 0
    assert found["loss_curve"][0] > 0
    frozen = [n for n, p in trainer.model.named_parameters() if not p.requires_grad]
    assert bool(frozen) == (name in ("documents", "mrpc", "reviews", "sst2", "sst2-padded"))


@pytest.mark.parametrize("name", ["yields", "mrpc", "sst2", "gpt"])
def test_a_task_whose_data_are_missing_says_where_to_get_them(name, no_files, monkeypatch):
    def unreachable(url):
        raise DataError("no network")

    monkeypatch.setattr(data_files, "fetched", unreachable)
    problem = TASKS[name]
    problem.make.cache_clear()
    with pytest.raises(DataError, match=r"https://|pip download"):
        problem.problem()


def test_a_killed_trajectory_goes_on_where_it_was_saved(tmp_path, monkeypatch):
    problem, steps = TASKS["gpt"].problem(small=True), (0, 2, 7)
    whole = [model.state_dict() for _, model in trajectory(problem, steps, 1e-2, tmp_path / "a")]
    assert not (tmp_path / "a" / "checkpoints" / "gpt-going.pt").exists()
    taken, plain = [], Trainer.train_step

    def counted(trainer):
        if len(taken) == 5:
            raise KeyboardInterrupt
        taken.append(trainer.steps)
        return plain(trainer)

    monkeypatch.setattr(Trainer, "train_step", counted)
    monkeypatch.setattr("experiments.lab.problem.GOING", 0.0)
    with pytest.raises(KeyboardInterrupt):
        list(trajectory(problem, steps, 1e-2, tmp_path / "b"))
    taken.clear()
    *_, (_, model) = trajectory(problem, steps, 1e-2, tmp_path / "b")
    assert taken == [5, 6]
    for name, value in whole[-1].items():
        assert torch.equal(value, model.state_dict()[name]), name


def real(name):
    try:
        return TASKS[name].problem()
    except DataError as error:
        pytest.skip(f"the data of {name} are not on this machine: {error}")


@pytest.mark.parametrize(
    ("name", "tokens", "first"),
    [("yields", 591, 12), ("mrpc", 30522, 101), ("sst2-padded", 30522, 101)],
)
def test_real_batches_begin_with_the_class_token(name, tokens, first):
    x, y = real(name).draw(torch.Generator().manual_seed(0), 8)
    assert (x[:, 0] == first).all()
    assert x.min() >= 0
    assert x.max() < tokens
    assert len(y) == 8


def test_the_pretrained_encoder_of_reactions_is_not_a_random_one():
    found, random = real("yields").model(), tiny_encoder(1)
    weights = [m.bert.bert.encoder.layer[0].intermediate.dense.weight for m in (found, random)]
    assert weights[0].dtype == torch.float32
    trained, initial = (float(weight.detach().std()) for weight in weights)
    assert trained > 1.5 * initial
