"""rho from the maps of a model's own eager attention and scipy's ranks: an independent path that knows nothing of ours."""

import numpy as np
import torch
from scipy import stats


def maps(model, ids):
    """Hidden states entering each layer, pre-softmax scores and weights of the model's own eager attention."""
    own, seen = model.config._attn_implementation, []
    softmax = torch.nn.functional.softmax

    def watched(x, *args, **kwargs):
        if x.dim() == 4:
            seen.append(x.float().numpy())
        return softmax(x, *args, **kwargs)

    model.set_attn_implementation("eager")
    torch.nn.functional.softmax = watched
    try:
        with torch.no_grad():
            out = model.get_decoder()(
                torch.as_tensor(ids), output_hidden_states=True, output_attentions=True, use_cache=False
            )
    finally:
        torch.nn.functional.softmax = softmax
        model.set_attn_implementation(own)
    assert len(seen) == len(out.attentions)
    return [h.double().numpy() for h in out.hidden_states[:-1]], seen, [w.float().numpy() for w in out.attentions]


def cosines(hidden):
    """[segment, token, token], rounded to float32 so that equal states tie."""
    unit = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
    return (unit @ unit.swapaxes(-1, -2)).astype(np.float32)


def spearman(a, b):
    """Pearson correlation of scipy's average ranks along the last axis; NaN where a side is constant."""
    a, b = (stats.rankdata(x, axis=-1) for x in (a, b))
    a, b = (x - x.mean(-1, keepdims=True) for x in (a, b))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def first_key(m, sink, window, chunk):
    return max(sink, m - window + 1 if window else 0, m - m % chunk if chunk else 0)


def free(hidden, weights, sink=1, window=0, chunk=0, rows=None, fewest=32):
    """rho [segment, head] of one layer from its maps."""
    similar, total, count = cosines(hidden)[:, None], 0.0, 0
    for m in range(weights.shape[2]) if rows is None else rows:
        low = first_key(m, sink, window, chunk)
        if m - low >= fewest:
            rho = spearman(similar[:, :, m, low:m], weights[:, :, m, low:m])
            total, count = total + np.nan_to_num(rho), count + np.isfinite(rho)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count if np.any(count) else np.full(weights.shape[:2], np.nan)


def fixed(hidden, scores, distance, sink=1, window=0, chunk=0):
    """rho_at_distance [segment, head] of one layer."""
    queries = [m for m in range(sink + distance, scores.shape[2]) if m - distance >= first_key(m, sink, window, chunk)]
    if len(queries) < 2:
        return np.full(scores.shape[:2], np.nan)
    keys = np.array(queries) - distance
    return spearman(cosines(hidden)[:, None, queries, keys], scores[:, :, queries, keys])


def assert_ordered_alike(found, expected, size):
    """Correlations of `size` entries, one for each head: equal to 1e-4, or to one exchange that float32 cannot decide.

    Two neighbours that change places move a sum of rank products by less than `size`, and rho by less than 12 / size²,
    which is more than 1e-4 below 350 entries.  In most heads an exchange moves the sum by a few: rho by 12 / size³ each.
    """
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    gap = np.abs(np.nan_to_num(found - expected))
    assert gap.max() <= max(1e-4, 12 / size**2)
    assert np.median(gap) <= max(1e-5, 12 / size**3)
