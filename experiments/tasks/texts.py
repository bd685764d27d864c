"""Sentences, reactions and characters as rows of tokens with their targets."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import DataError
from ..lab.trainer import Batch
from . import files

PAD, CLS, SEP = "[PAD]", "[CLS]", "[SEP]"
SMILES = re.compile(
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@"
    r"|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
"""Splits a reaction into atoms, bonds and brackets, as rxnfp was trained."""
POOL = 50
"""Batches that are sorted by length together."""
LONGEST = 512
"""Word pieces of a text that is not cut; no sentence has so many."""
TOLD = 24
"""Characters of a bad line that an error shows."""


class Texts(NamedTuple):
    """Rows of tokens, padded with ``pad`` at the end, and a target for each."""

    tokens: Tensor
    lengths: Tensor
    targets: Tensor
    pad: int

    def batch(self, index: Tensor) -> Batch:
        """These rows, padded to the longest of them."""
        longest = int(self.lengths[index].max())
        return self.tokens[index, :longest].long(), self.targets[index]

    def part(self, start: int, stop: int | None = None) -> Texts:
        cut = slice(start, stop)
        return Texts(self.tokens[cut], self.lengths[cut], self.targets[cut], self.pad)

    def batches(self, size: int) -> list[Batch]:
        """All rows in the order of their lengths, for evaluation."""
        order = self.lengths.argsort(stable=True)
        return [self.batch(index) for index in torch.split(order, size)]


def texts(rows: Sequence[Sequence[int]], targets: Tensor, pad: int) -> Texts:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.full((len(rows), int(lengths.max())), pad, dtype=torch.int32)
    for own, row in zip(tokens, rows, strict=True):
        own[: len(row)] = torch.tensor(row, dtype=torch.int32)
    return Texts(tokens, lengths, targets, pad)


def drawn_at_random(of: Texts) -> Callable[[torch.Generator, int], Batch]:
    """Batches of any lengths, padded to the longest."""

    def draw(source: torch.Generator, size: int) -> Batch:
        return of.batch(torch.randint(len(of.targets), (size,), generator=source))

    return draw


def drawn_by_length(of: Texts) -> Callable[[torch.Generator, int], Batch]:
    """Batches of like lengths: ``POOL`` of them drawn and sorted, and one of those taken.

    Each row is as likely in a batch as any other.
    """

    def draw(source: torch.Generator, size: int) -> Batch:
        pool = torch.randint(len(of.targets), (POOL * size,), generator=source)
        chosen = int(torch.randint(POOL, (), generator=source))
        order = of.lengths[pool].argsort(stable=True)
        return of.batch(pool[order[chosen * size : (chosen + 1) * size]])

    return draw


def table_rows(content: bytes, header: Sequence[str], name: str) -> Iterator[list[str]]:
    """The cells of each line of a tab-separated file without quoting, below its header."""
    lines = content.decode("utf-8-sig").split("\n")
    if lines[0].split("\t") != list(header):
        raise DataError(f"{name} begins with {lines[0][:TOLD]!r}, expected the columns {header}")
    for number, line in enumerate(lines[1:], start=2):
        if not line:
            continue
        cells = line.split("\t")
        if len(cells) != len(header):
            raise DataError(
                f"{name}, line {number}: {len(cells)} cells, expected {len(header)} ({header})"
            )
        yield cells


def sst2_sentences(content: bytes, name: str = "SST-2") -> tuple[list[str], Tensor]:
    """Sentences, and 1 for praise."""
    rows = list(table_rows(content, ("sentence", "label"), name))
    return [row[0].strip() for row in rows], torch.tensor([int(row[1]) for row in rows])


def mrpc_pairs(content: bytes, name: str = "MRPC") -> tuple[list[tuple[str, str]], Tensor]:
    """Pairs of sentences, and 1 for the same meaning."""
    header = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
    rows = list(table_rows(content, header, name))
    return [(row[3], row[4]) for row in rows], torch.tensor([int(row[0]) for row in rows])


def reaction_yields(content: bytes, name: str = "yields") -> tuple[list[str], Tensor]:
    """Reactions as SMILES, and their yields from 0 to 1."""
    rows = list(table_rows(content, ("", "rxn", "y"), name))
    return [row[1] for row in rows], torch.tensor([float(row[2]) for row in rows])


def split_smiles(reaction: str) -> list[str]:
    """Atoms, bonds and brackets of a reaction.

    >>> split_smiles("Brc1ccc[nH]1>>C")
    ['Br', 'c', '1', 'c', 'c', 'c', '[nH]', '1', '>>', 'C']
    """
    parts = SMILES.findall(reaction)
    if "".join(parts) != reaction:
        raise DataError(f"{reaction[:TOLD]!r}... has characters that no token of SMILES has")
    return parts


def reaction_tokens(reactions: Sequence[str], vocabulary: Sequence[str]) -> list[list[int]]:
    """[CLS], the parts of the reaction, [SEP]; as numbers of the vocabulary."""
    places = {token: place for place, token in enumerate(vocabulary)}
    try:
        return [[places[t] for t in (CLS, *split_smiles(r), SEP)] for r in reactions]
    except KeyError as error:
        raise DataError(f"the vocabulary has no token {error}") from None


def load_yields() -> tuple[Texts, Texts]:
    """Training and test; the yields standardised by the mean and spread of the training rows."""
    reactions, wanted = reaction_yields(files.YIELDS.read("suzuki_random_split_0.tsv"))
    vocabulary = files.YIELDS.read("vocab.txt").decode().split()
    train = 4032
    mean, spread = wanted[:train].mean(), wanted[:train].std()
    made = texts(
        reaction_tokens(reactions, vocabulary), (wanted - mean) / spread, vocabulary.index(PAD)
    )
    return made.part(0, train), made.part(train)


def _word_pieces(sentences: Sequence[Any], targets: Tensor, longest: int = LONGEST) -> Texts:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_str(files.MINILM.read("tokenizer.json").decode())
    tokenizer.enable_truncation(longest)
    tokenizer.no_padding()
    rows = [tokenizer.encode(*(s if isinstance(s, tuple) else (s,))).ids for s in sentences]
    return texts(rows, targets, int(tokenizer.token_to_id(PAD)))


def load_sst2() -> tuple[Texts, Texts, Texts]:
    """Training, validation and test."""
    names = ("train.tsv", "dev.tsv", "test_labelled.tsv")
    train, dev, test = (_word_pieces(*sst2_sentences(files.SST2.read(n), n)) for n in names)
    return train, dev, test


def load_mrpc() -> tuple[Texts, Texts, Texts]:
    """Training, validation and test."""
    names = ("train.tsv", "dev.tsv", "msr_paraphrase_test.txt")
    train, dev, test = (_word_pieces(*mrpc_pairs(files.MRPC.read(n), n)) for n in names)
    return train, dev, test


def load_reviews(longest: int = LONGEST) -> tuple[Texts, Texts, Texts]:
    """Training, validation and test: cut texts, split by their numbers; 1 for praise."""
    packed = io.BytesIO(files.REVIEWS.read("movie_reviews.zip"))
    parts: tuple[list[tuple[str, int]], ...] = ([], [], [])
    with zipfile.ZipFile(packed) as archive:
        for name in sorted(archive.namelist()):
            if found := re.search(r"(neg|pos)/cv(\d)\d\d_.*\.txt$", name):
                label, fold = found[1] == "pos", int(found[2])
                text = archive.read(name).decode("latin-1")
                parts[max(0, fold - 7)].append((text, int(label)))
    train, dev, test = (
        _word_pieces([text for text, _ in part], torch.tensor([own for _, own in part]), longest)
        for part in parts
    )
    return train, dev, test


def character_numbers(text: str) -> tuple[Tensor, list[str]]:
    """Each character as its place among those that occur.

    >>> character_numbers("abba")[0].tolist()
    [0, 1, 1, 0]
    """
    alphabet = sorted(set(text))
    places = {character: place for place, character in enumerate(alphabet)}
    return torch.tensor([places[character] for character in text]), alphabet


def load_shakespeare() -> tuple[Tensor, Tensor]:
    """The first nine tenths of the characters for training, the rest for validation."""
    numbers, _ = character_numbers(files.SHAKESPEARE.read("input.txt").decode())
    train = int(0.9 * len(numbers))
    return numbers[:train], numbers[train:]
