"""The yardstick of a preparation: what a unigram and a bigram model of bytes, fitted on train, reach on val.

    pairs = count_byte_pairs([b"one document", b"another"])
    byte_models(train_pairs, val_pairs)         # {"unigram_nats_per_byte": ..., "bigram_nats_per_byte": ...}

A GPT that does not beat the bigrams has learned next to nothing.
"""
import numpy as np

COUNTED_BYTES = 100_000_000     # of each split, the first ones: more changes the third digit, and costs time


def count_byte_pairs(documents: list[bytes]) -> np.ndarray:
    """How often which symbol follows which: int64 (257, 257), [before, after]. Symbol 256 ends each document."""
    end = np.array([256], dtype=np.int64)
    texts = (np.frombuffer(text, dtype=np.uint8) for text in documents)
    symbols = np.concatenate([end] + [part for text in texts for part in (text, end)])
    return np.bincount(symbols[:-1] * 257 + symbols[1:], minlength=257 * 257).reshape(257, 257)


def byte_models(train: np.ndarray, val: np.ndarray) -> dict:
    """Loss on val of two models fitted on train (add-one smoothing), from both splits' pair counts, in nats per byte.

    The cost of the separators counts, as it does in a GPT's loss, and is spread over the bytes of the text.
    """
    unigram = -np.log((train.sum(0) + 1) / (train.sum() + 257))
    bigram = -np.log((train + 1) / (train.sum(1, keepdims=True) + 257))
    val_bytes = max(1, int(val[:, :256].sum()))
    return {"unigram_nats_per_byte": float((val.sum(0) * unigram).sum() / val_bytes),
            "bigram_nats_per_byte": float((val * bigram).sum() / val_bytes)}
