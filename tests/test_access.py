"""rp.capture and rp.attention_map equal the eager attention maps."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig

import rope_probe as rp

SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
)
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=4),
    "gemma2": Gemma2Config(**SMALL, sliding_window=4, query_pre_attn_scalar=64, attn_logit_softcapping=5.0),
    "gpt_oss": GptOssConfig(**SMALL, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
}
TOKENS = np.arange(24).reshape(2, 12) + 1


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def eager(model):
    with torch.no_grad():
        return [a.numpy() for a in model(torch.as_tensor(TOKENS), output_attentions=True).attentions]


def test_weights_equal_eager_maps(model):
    with rp.capture(rp.open(model), keep="weights") as c:
        c.run(TOKENS)
    for layer, expected in enumerate(eager(model)):
        np.testing.assert_allclose(c.weights[layer], expected, atol=2e-6)
        one = rp.attention_map(rp.open(model), layer, 3, TOKENS[1])
        np.testing.assert_allclose(one, expected[1, 3], atol=2e-6)


def test_scores_give_the_weights(model):
    """Masked keys are -inf; without sink logits the softmax of the scores is the map."""
    with rp.capture(rp.open(model), keep=("scores",)) as c:
        c.run(TOKENS)
    for layer, expected in enumerate(eager(model)):
        exp = np.exp(c.scores[layer])
        assert ((exp == 0) == (expected == 0)).all()
        rows = expected.sum(-1, keepdims=True)  # below 1 where a sink takes its share
        np.testing.assert_allclose(exp / exp.sum(-1, keepdims=True) * rows, expected, atol=2e-6)


def test_before_rotation_equals_the_projections(model):
    kept = {}
    attention = model.model.layers[1].self_attn
    hooks = [
        getattr(attention, name).register_forward_hook(lambda m, a, out, name=name: kept.update({name: out}))
        for name in ("q_proj", "k_proj")
    ]
    with rp.capture(rp.open(model), layers=[1], keep=("q_before", "k_before", "q")) as c:
        c.run(TOKENS)
    for hook in hooks:
        hook.remove()
    for name, found in (("q_proj", c.q_before[1]), ("k_proj", c.k_before[1])):
        expected = kept[name].reshape(2, 12, -1, 16).transpose(1, 2).detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(c.q[1] - c.q_before[1]).max() > 0.1


def test_chosen_heads_come_with_the_keys_they_read(model):
    with rp.capture(rp.open(model), layers=[0], keep=("q", "k", "v")) as whole:
        whole.run(TOKENS)
    with rp.capture(rp.open(model), layers=[0], heads=[3, 0], keep=("q", "k", "v")) as c:
        c.run(TOKENS)
    np.testing.assert_array_equal(c.q[0], whole.q[0][:, [3, 0]])
    np.testing.assert_array_equal(c.k[0], whole.k[0][:, [1, 0]])
    np.testing.assert_array_equal(c.v[0], whole.v[0][:, [1, 0]])


def test_wrong_requests_are_sentences(model):
    ckpt = rp.open(model)
    with pytest.raises(rp.ProbeError, match="keep knows .* not 'queries'"):
        rp.capture(ckpt, keep=("queries",))
    with pytest.raises(rp.ProbeError, match="heads .*4.* between 0 and 3"), rp.capture(ckpt, heads=[4]):
        pass
    with pytest.raises(rp.ProbeError, match="no layer 7"), rp.capture(ckpt, layers=[7]):
        pass
    with pytest.raises(rp.ProbeError, match="one segment"):
        rp.attention_map(ckpt, 0, 0, TOKENS)
