"""The yardstick of a preparation: what a unigram and a bigram model of bytes, fitted on train, reach on val.

    pairs = count_byte_pairs([b"one document", b"another"])
    byte_models(train_pairs, val_pairs)         # {"unigram_nats_per_byte": ..., "bigram_nats_per_byte": ...}

A GPT that does not beat the bigrams has learned next to nothing.
"""
import numpy as np

COUNTED_BYTES = 20_000_000      # of each split, the first ones: more would hardly change a digit, and cost time


def count_byte_pairs(documents: list[bytes]) -> np.ndarray:
    """How often which symbol follows which: int64 (257, 257), [before, after]. Symbol 256 ends each document."""
    counts, text = np.zeros((257, 257), dtype=np.int64), b"".join(documents)
    for start in (0, 1):        # as numbers of two bytes, those pairs that begin at even and at odd places
        pairs = np.frombuffer(text[start:len(text) - (len(text) - start) % 2], dtype="<u2")
        counts[:256, :256] += np.bincount(pairs, minlength=2 ** 16).reshape(256, 256).T
    whole = [document for document in documents if document]
    first, last = (np.array([document[place] for document in whole], dtype=np.int64) for place in (0, -1))
    np.add.at(counts, (256, first), 1)
    np.add.at(counts, (last, 256), 1)
    np.subtract.at(counts, (last[:-1], first[1:]), 1)      # these were not neighbours, the separator was between them
    counts[256, 256] += len(documents) - len(whole)
    return counts


def byte_models(train: np.ndarray, val: np.ndarray) -> dict:
    """Loss on val of two models fitted on train (add-one smoothing), from both splits' pair counts, in nats per byte.

    The cost of the separators counts, as it does in a GPT's loss, and is spread over the bytes of the text.
    """
    unigram = -np.log((train.sum(0) + 1) / (train.sum() + 257))
    bigram = -np.log((train + 1) / (train.sum(1, keepdims=True) + 257))
    val_bytes = max(1, int(val[:, :256].sum()))
    return {"unigram_nats_per_byte": float((val.sum(0) * unigram).sum() / val_bytes),
            "bigram_nats_per_byte": float((val * bigram).sum() / val_bytes)}
