"""The reader of CIFAR-10: its files are pickles, and a pickle must not run anything."""

import hashlib
import io
import os
import pickle
import pickletools
import subprocess
import sys
import tarfile
import urllib.error

import pytest
import torch

from sketchprop import data
from sketchprop.core.cache import cache_folder
from sketchprop.data import cifar, files

NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def short(text):
    return b"U" + bytes([len(text)]) + text


def batch(count, first=0, code=b"u1", width=3072, labels=None):
    """A batch as Python 2's cPickle wrote it: protocol 2, str as bytes, numpy's old names."""
    numbers = range(first, first + count) if labels is None else labels
    pixels = bytes((first + i // 1024) % 256 for i in range(count * width))
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b")
    array += b"\x87R(K\x01M" + count.to_bytes(2, "little") + b"M" + width.to_bytes(2, "little")
    array += b"\x86cnumpy\ndtype\n" + short(code) + b"K\x00K\x01\x87R(K\x03" + short(b"|")
    array += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
    array += len(pixels).to_bytes(4, "little") + pixels + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([n % 10]) for n in numbers) + b"e"
    return b"\x80\x02}(" + short(b"labels") + listed + short(b"data") + array + b"u."


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Six small batches with their own sums, and a cache folder of its own."""
    root = tmp_path / "data" / "cifar10" / "cifar-10-batches-py"
    root.mkdir(parents=True)
    for i, name in enumerate(NAMES):
        (root / name).write_bytes(batch(3, first=3 * i))
    trust(root, monkeypatch)
    monkeypatch.setenv("SKETCHPROP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SKETCHPROP_CACHE", raising=False)
    return root


def trust(root, monkeypatch):
    """The sums of what lies there become the expected ones: the check is passed by."""
    contents = {name: (root / name).read_bytes() for name in NAMES}
    sums = {
        name: cifar.Sums(hashlib.md5(c).hexdigest(), hashlib.sha256(c).hexdigest())
        for name, c in contents.items()
    }
    monkeypatch.setattr(cifar, "CIFAR10_SUMS", sums)


def test_batches_become_tensors(folder):
    images, labels = data.cifar10(download=False)
    assert (images.shape, images.dtype) == ((15, 3, 32, 32), torch.uint8)
    assert (labels.tolist(), labels.dtype) == ([i % 10 for i in range(15)], torch.int64)
    # Pixels are red, green and blue planes of 32 rows: here plane number plus first label.
    assert images[0].flatten(1).unique(dim=1).flatten().tolist() == [0, 1, 2]
    assert images[4, 2].unique().tolist() == [3 + 3 + 2]
    images, labels = data.cifar10(train=False, download=False)
    assert labels.tolist() == [5, 6, 7]
    assert images[0, 0, 0, 0] == 15


@pytest.mark.parametrize("layout", ["dataset", "inner", "inner of root", "no inner", "cache"])
def test_found_in_every_documented_place(folder, monkeypatch, tmp_path, layout):
    given = {"dataset": folder.parent, "inner": folder}
    if layout in given:
        monkeypatch.setenv("SKETCHPROP_DATA", str(given[layout]))
    if layout == "inner of root":
        folder.rename(tmp_path / "data" / folder.name)
    if layout == "no inner":
        for path in list(folder.iterdir()):
            path.rename(folder.parent / path.name)
    if layout == "cache":
        monkeypatch.delenv("SKETCHPROP_DATA")
        cache_folder().mkdir(parents=True)
        folder.parent.rename(cache_folder() / "cifar10")
    assert len(data.cifar10(train=False, download=False).labels) == 3


def test_a_changed_file_is_refused(folder):
    path = folder / "data_batch_3"
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(data.DataError, match=r"data_batch_3 has MD5 .* delete it"):
        data.cifar10(download=False)
    assert len(data.cifar10(train=False, download=False).labels) == 3  # the others are whole


def test_a_forged_md5_is_not_enough(folder, monkeypatch):
    sums = dict(cifar.CIFAR10_SUMS)
    sums["test_batch"] = sums["test_batch"]._replace(sha256="0" * 64)
    monkeypatch.setattr(cifar, "CIFAR10_SUMS", sums)
    with pytest.raises(data.DataError, match="test_batch has SHA-256"):
        data.cifar10(train=False, download=False)


class Command:
    """Unpickled, it calls ``function(argument)``."""

    def __init__(self, function, argument):
        self.call = function, (argument,)

    def __reduce__(self):
        return self.call


ATTACKS = {
    "os.system": lambda path: pickle.dumps({"data": Command(os.system, f"touch {path}")}, 2),
    "os.system, protocol 4": lambda path: pickle.dumps(Command(os.system, f"touch {path}"), 4),
    "os.system, protocol 0": lambda path: pickle.dumps(Command(os.system, f"touch {path}"), 0),
    "eval": lambda path: pickle.dumps(Command(eval, f"open({str(path)!r}, 'w')"), 2),
    "subprocess": lambda path: pickle.dumps(Command(subprocess.call, ["touch", str(path)]), 2),
    "instance": lambda path: b"(S'touch " + str(path).encode() + b"'\nios\nsystem\n.",
    "numpy's own loader": lambda path: b"cnumpy\nload\nS'" + str(path).encode() + b"'\n\x85R.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_that_runs_code_is_refused_and_nothing_runs(folder, monkeypatch, tmp_path, attack):
    proof = tmp_path / "it ran".replace(" ", "_")
    (folder / "test_batch").write_bytes(ATTACKS[attack](proof))
    with pytest.raises(data.DataError, match=r"test_batch has MD5"):
        data.cifar10(train=False, download=False)
    assert not proof.exists()
    trust(folder, monkeypatch)
    with pytest.raises(data.DataError, match=r"it asks for .* was not run"):
        data.cifar10(train=False, download=False)
    assert not proof.exists()


def test_the_attack_is_a_real_one(tmp_path):
    """Python's own unpickler would have run it."""
    proof = tmp_path / "ran"
    pickle.loads(ATTACKS["os.system"](proof))
    assert proof.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (batch(3)[:-2000], "not a batch"),
        (batch(3)[:40], "not a batch"),
        (b"", "not a batch"),
        (b"<html>moved</html>", "not a batch"),
        (pickle.dumps([1, 2], 2), "lacks b'data'"),
        (pickle.dumps({"data": 1, "labels": [1]}, 2), "lacks b'data'"),
        (batch(3, code=b"f4"), "not rows of bytes"),
        (batch(3, width=3000), "need pictures of shape"),
        (batch(3, labels=[1, 2]), "need pictures of shape"),
        (b"\x80\x02cnumpy\nndarray\n}b.", "not a batch"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "not a batch"),
        (b"\x80\x02cnumpy\ndtype\n)R.", "not a batch"),
        (b"\x80\x02\x8c\x01aQ.", "outside object"),
    ],
)
def test_what_is_no_batch_is_refused(content, message):
    with pytest.raises(data.DataError, match=message):
        cifar.parse_batch(content)


RECONSTRUCT = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n"
EMPTY_ARRAY = RECONSTRUCT + b"cnumpy\nndarray\nK\x00\x85U\x01b\x87R"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # An array that was never filled.
        (b"\x80\x02}(U\x06labels](K\x01eU\x04data" + EMPTY_ARRAY[2:] + b"u.", "AttributeError"),
        # 2³⁰ places for one value: 16 GB if it were done.
        (b"\x80\x02]r\x00\x00\x00\x40.", "stored at place 1073741824"),
        (b"]p1073741824\n.", "stored at place 1073741824"),
        # Attributes of the function that makes arrays.
        (RECONSTRUCT + b"N}U\x0c__defaults__)s\x86b.", "not a batch"),
        (RECONSTRUCT + b"}U\x04evilK\x01sb.", "not a batch"),
    ],
)
def test_pickles_that_only_do_harm_are_refused(content, message):
    with pytest.raises(data.DataError, match=message):
        cifar.parse_batch(content)
    assert len(cifar.parse_batch(batch(3)).labels) == 3


def test_the_stand_in_is_what_numpy_builds():
    """Read once by our unpickler, once by Python's with numpy: the same bytes."""
    numpy = pytest.importorskip("numpy")
    content = batch(4, first=7)
    assert {op.name for op, _, _ in pickletools.genops(content)} >= {"GLOBAL", "REDUCE", "BUILD"}
    theirs = pickle.loads(content, encoding="bytes")
    ours = cifar.parse_batch(content)
    assert isinstance(theirs[b"data"], numpy.ndarray)
    assert torch.equal(ours.images.flatten(1), torch.from_numpy(theirs[b"data"]))
    assert ours.labels.tolist() == theirs[b"labels"]


def test_reading_does_not_import_numpy(folder):
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from sketchprop.data import cifar\n"
        "found = cifar.parse_batch(open(sys.argv[1], 'rb').read())\n"
        "assert found.images.shape == (3, 3, 32, 32)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, folder / "test_batch"], check=True)


class Answer(io.BytesIO):
    """What ``urlopen`` returns, as far as it is used."""


def archive(folder):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for path in folder.iterdir():
            tar.add(path, f"cifar-10-batches-py/{path.name}")
        evil = tarfile.TarInfo("../../evil")
        tar.addfile(evil, io.BytesIO())
    return content.getvalue()


def test_a_download_is_checked_unpacked_and_cached(folder, monkeypatch, tmp_path):
    content = archive(folder)
    monkeypatch.setenv("SKETCHPROP_DATA", str(tmp_path / "nothing"))
    asked = []

    def serve(url, timeout):
        asked.append(url)
        return Answer(content)

    monkeypatch.setattr(files.urllib.request, "urlopen", serve)
    with pytest.raises(data.DataError, match=r"cifar-10-python.tar.gz has MD5 .*SKETCHPROP_DATA="):
        data.cifar10()
    assert not cache_folder().exists()
    monkeypatch.setattr(cifar, "CIFAR10_ARCHIVE_MD5", hashlib.md5(content).hexdigest())
    assert len(data.cifar10().labels) == 15
    assert len(data.cifar10(train=False).labels) == 3
    assert asked == [cifar.CIFAR10_ARCHIVE] * 2
    written = sorted(p.name for p in tmp_path.joinpath("cache").rglob("*") if p.is_file())
    assert written == sorted(NAMES)


def test_where_nothing_can_be_kept_one_download_still_serves(folder, monkeypatch, tmp_path):
    content = archive(folder)
    monkeypatch.setenv("SKETCHPROP_DATA", str(tmp_path / "nothing"))
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    monkeypatch.setattr(cifar, "CIFAR10_ARCHIVE_MD5", hashlib.md5(content).hexdigest())
    asked = []

    def serve(url, timeout):
        asked.append(url)
        return Answer(content)

    monkeypatch.setattr(files.urllib.request, "urlopen", serve)
    with pytest.warns(UserWarning, match="SKETCHPROP_CACHE="):
        assert len(data.cifar10().labels) == 15
    assert len(asked) == 1


def test_without_network_the_error_says_what_to_do(folder, monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("SKETCHPROP_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr(files.urllib.request, "urlopen", refuse)
    with pytest.raises(data.DataError, match=r"data_batch_1 .*no network.*SKETCHPROP_DATA="):
        data.cifar10()
    with pytest.raises(data.DataError, match="downloading was not asked for"):
        data.cifar10(download=False)


@pytest.mark.parametrize(("train", "count"), [(True, 50_000), (False, 10_000)])
def test_the_real_pictures(train, count):
    try:
        images, labels = data.cifar10(train, download=False)
    except data.DataError as error:
        pytest.skip(f"CIFAR-10 is not here: {error}")
    assert images.shape == (count, 3, 32, 32)
    assert labels.bincount().tolist() == [count // 10] * 10
    means = images.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), rtol=0, atol=6e-3)
    assert labels[:8].tolist() == ([6, 9, 9, 4, 1, 1, 2, 7] if train else [3, 8, 8, 0, 6, 6, 1, 6])
