"""Torch modules: find the features, change nothing, reject what cannot work."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from caster import CasterError
from caster.models.preprocessing import Preprocessing
from caster.models.torch import TorchModel
from tests.support.messages import error_line

CLASSES = 7
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def settled(net: nn.Module) -> nn.Module:
    """Give BatchNorms and heads values that a fresh module does not have."""
    torch.manual_seed(1)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    return net.eval()


def small() -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict(
        conv=nn.Conv2d(3, 8, 3, stride=2),
        norm=nn.BatchNorm2d(8),
        act=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        hidden=nn.Linear(8, 6),
        drop=nn.Dropout(0.5),
        fc=nn.Linear(6, CLASSES),
    )
    return settled(nn.Sequential(layers))


@pytest.fixture
def net():
    return small()


def rejection(module, batch=IMAGES, **options) -> str:
    return error_line(lambda: TorchModel(module, **options)(batch))


class Answering(nn.Module):
    """A module whose forward is a function of its classifier and the images."""

    def __init__(self, forward, width=3 * 32 * 32):
        super().__init__()
        self.fc = nn.Linear(width, CLASSES)
        self.answer = forward

    def forward(self, images):
        return self.answer(self.fc, images)


# --- architectures ---------------------------------------------------------------------------

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
TIMM = {
    "resnet18": ("fc", {"channels": (8, 12, 16, 20)}),
    "resnet50": ("fc", {"channels": (8, 12, 16, 20), "layers": (1, 1, 1, 1)}),
    "convnext_tiny": ("head.fc", {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20)}),
    "vit_base_patch16_224": ("head", VIT),
    "vit_base_patch16_gap_224": ("head", VIT),
    "deit_base_patch16_224": ("head", VIT),
    "swin_tiny_patch4_window7_224": (
        "head.fc",
        {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)},
    ),
    "efficientnet_lite0": ("classifier", {}),
    "mobilenetv3_small_050": ("classifier", {}),
}


def from_timm(name):
    import timm

    torch.manual_seed(0)
    return settled(timm.create_model(name, num_classes=CLASSES, **TIMM[name][1]))


def torchvision_vgg():
    from torchvision import models

    with torch.device("meta"):  # its own classifier has a hundred million weights
        net = models.VGG(nn.Identity())
    net.features = models.vgg.make_layers([8, "M", 12, "M"])
    net.classifier = nn.Sequential(
        nn.Linear(12 * 49, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, CLASSES)
    )
    return net


def torchvision_net(name):
    from torchvision import models

    block = models.convnext.CNBlockConfig
    return {
        "resnet": lambda: models.resnet18(num_classes=CLASSES),
        "convnext": lambda: models.ConvNeXt(
            [block(8, 12, 1), block(12, None, 1)], num_classes=CLASSES
        ),
        "vit": lambda: models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=CLASSES),
        "swin": lambda: models.SwinTransformer(
            [4, 4], 12, [1, 1], [2, 2], [4, 4], num_classes=CLASSES
        ),
        "efficientnet": lambda: models.efficientnet_b0(num_classes=CLASSES),
        "vgg": torchvision_vgg,
    }[name]()


def transformers_net(name):
    import transformers as hf

    common = {"image_size": 32, "num_labels": CLASSES}
    narrow = {"hidden_sizes": [8, 12], "depths": [1, 1]} | common
    vit = {"patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    swin = {"patch_size": 4, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2]}
    return {
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**vit, intermediate_size=48, **common)
        ),
        "resnet": lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, layer_type="basic", **narrow)
        ),
        "swin": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(**swin, window_size=4, **common)
        ),
        "convnext": lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(num_stages=2, **narrow)
        ),
    }[name]()


def answer(net):
    """The logits of the bare module."""
    with torch.no_grad():
        returned = net(IMAGES)
    return getattr(returned, "logits", returned)


def without(net, head):
    """A copy with an identity as its classifier: it returns the features."""
    beheaded = copy.deepcopy(net)
    parent, _, name = head.rpartition(".")
    setattr(beheaded.get_submodule(parent), name, nn.Identity())
    return beheaded


def check(net, head):
    """The head is found; features and logits are those of the bare module."""
    logits, features = answer(net), answer(without(net, head))
    model = TorchModel(net)
    outputs = model(IMAGES)
    assert model.head == head
    assert torch.equal(outputs.logits, logits)
    assert torch.equal(outputs.features, features)
    assert outputs.features.shape[0] == len(IMAGES)
    with torch.no_grad():
        assert torch.equal(net.get_submodule(head)(features), logits)
    assert torch.equal(answer(net), logits)
    assert torch.equal(model(IMAGES).features, features)
    model.verify()


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    net = from_timm(name)
    check(net, TIMM[name][0])
    with torch.no_grad():
        features = net.forward_head(net.forward_features(IMAGES), pre_logits=True)
    assert torch.equal(TorchModel(net)(IMAGES).features, features)


def test_timm_distilled_needs_a_named_head():
    """It returns the mean of two classifiers, so neither output is the logits."""
    import timm

    net = timm.create_model("deit_base_distilled_patch16_224", num_classes=CLASSES, **VIT)
    net = settled(net)
    message = rejection(net)
    assert message.startswith("VisionTransformerDistilled does not return the output of a Linear")
    assert message.endswith("head, head_dist")
    with torch.no_grad():
        tokens = net.forward_features(IMAGES)
        means = (net.head(tokens[:, 0]) + net.head_dist(tokens[:, 1])) / 2
    for i, head in enumerate(("head", "head_dist")):
        outputs = TorchModel(net, head=head)(IMAGES)
        assert torch.equal(outputs.features, tokens[:, i])
        assert torch.equal(outputs.logits, means)


HEADS = {
    "resnet": "fc",
    "convnext": "classifier.2",
    "vit": "heads.head",
    "swin": "head",
    "efficientnet": "classifier.1",
    "vgg": "classifier.3",
}


@pytest.mark.parametrize("name", HEADS)
def test_torchvision(name):
    torch.manual_seed(0)
    check(settled(torchvision_net(name)), HEADS[name])


def test_torchvision_squeezenet_is_rejected():
    """It classifies before it pools, so there are no rows of features."""
    from torchvision import models

    net = models.squeezenet1_1(num_classes=CLASSES).eval()
    images = torch.zeros(2, 3, 64, 64)
    assert rejection(net, images).endswith("name its classifier with head=; it has no Linear")
    assert "'classifier' is (2, 512, 3, 3), not" in rejection(net, images, head="classifier")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("vit", "classifier"),
        ("resnet", "classifier.1"),
        ("swin", "classifier"),
        ("convnext", "classifier"),
    ],
)
def test_transformers(name, head):
    torch.manual_seed(0)
    check(settled(transformers_net(name)), head)


# --- the classifier --------------------------------------------------------------------------


def test_the_module_itself_may_be_the_classifier():
    net = nn.Linear(5, 3)
    rows = torch.randn(4, 5)
    outputs = TorchModel(net)(rows)
    assert torch.equal(outputs.features, rows)
    with torch.no_grad():
        assert torch.equal(outputs.logits, net(rows))


@pytest.mark.parametrize("head", ["fc", "hidden", "drop", "norm", "flat"])
def test_a_layer_by_name(net, head):
    """The features are its input, as an independent hook sees it."""
    caught = []
    hook = net.get_submodule(head).register_forward_hook(lambda _, given, out: caught.append(given))
    logits = answer(net)
    hook.remove()
    ((given,),) = caught
    if head == "norm":
        assert "the input of 'norm' is (4, 8, 15, 15), not (samples" in rejection(net, head=head)
        return
    outputs = TorchModel(net, head=head)(IMAGES)
    assert torch.equal(outputs.features, given.flatten(1))  # (4, 8, 1, 1) goes into `flat`
    assert torch.equal(outputs.logits, logits)


def test_head_names_that_are_rejected(net):
    message = rejection(net, head="classifier")
    assert message == "Sequential has no layer 'classifier': its last Linear layers are hidden, fc"
    assert (
        rejection(nn.Flatten(), head="x", name="flat") == "flat has no layer 'x': it has no Linear"
    )
    spare = Answering(lambda fc, images: nn.functional.linear(images.flatten(1), fc.weight))
    assert rejection(spare, head="fc") == "Answering did not call its head 'fc'"


def test_the_last_of_several_equal_outputs_is_the_classifier():
    """Classifiers are often initialised to zero, so earlier layers may have the same output."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 5), nn.Linear(5, 5))
    for layer in net[1:]:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    model = TorchModel(net)
    assert model(IMAGES).features.shape == (4, 5)
    assert model.head == "2"


def test_identity_layers_after_the_classifier():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 5), nn.Dropout(), nn.Identity()).eval()
    model = TorchModel(net)
    model(IMAGES)
    assert model.head == "1"


def test_a_softmax_after_the_classifier(net):
    chances = nn.Sequential(net, nn.Softmax(1))
    message = rejection(chances)
    assert "does not return the output of a Linear layer" in message
    assert message.endswith("its last Linear layers are 0.hidden, 0.fc")
    outputs = TorchModel(chances, head="0.fc")(IMAGES)
    assert torch.equal(outputs.features, TorchModel(net)(IMAGES).features)
    assert torch.equal(outputs.logits, answer(net).softmax(1))


ANSWERS = {
    "a tuple": (lambda fc, images: (fc(images.flatten(1)), None), "not tuple"),
    "a dict": (lambda fc, images: {"logits": fc(images.flatten(1))}, "not dict"),
    "tokens": (lambda fc, images: fc(images.flatten(1))[:, None], "not (4, 1, 7)"),
    "one row": (lambda fc, images: fc(images.flatten(1))[0], "not (7,)"),
}


@pytest.mark.parametrize(("forward", "reason"), ANSWERS.values(), ids=ANSWERS)
def test_outputs_that_are_not_logits(forward, reason):
    for head in (None, "fc"):
        message = rejection(Answering(forward), head=head)
        assert message == f"Answering must return logits (samples, classes), {reason}"


def test_a_classifier_of_tokens_is_rejected():
    net = Answering(lambda fc, images: fc(images.flatten(2)).mean(1), width=32 * 32)
    assert "does not return the output of a Linear layer" in rejection(net)
    assert rejection(net, head="fc") == (
        "the input of 'fc' is (4, 3, 1024), not (samples, features): "
        "name a layer after the pooling with head="
    )


# --- nothing changes -------------------------------------------------------------------------


def hooks(net):
    return [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in net.modules()]


def test_the_module_is_not_changed(net):
    before = copy.deepcopy(net.state_dict())
    model = TorchModel(net)
    digest = model.sha256
    for _ in range(3):
        model(IMAGES)
    after = net.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert int(after["norm.num_batches_tracked"]) == 0
    assert model.sha256 == digest == TorchModel(net).sha256
    assert not any(hooks(net))
    assert all(value.requires_grad and value.grad is None for value in net.parameters())
    assert model.module is net
    model.verify()


def test_hooks_are_removed_if_the_module_fails(net):
    for head in (None, "fc"):
        with pytest.raises(CasterError, match=r"cannot take a batch of float32 \(4, 2, 32, 32\)"):
            TorchModel(net, head=head)(IMAGES[:, :2])
    rejection(nn.Sequential(net, nn.Softmax(1)))
    assert not any(hooks(net))


def test_dropout_is_off_and_batch_statistics_are_not_used(net):
    model = TorchModel(net)
    together, alone = model(IMAGES), [model(IMAGES[i : i + 1]) for i in range(4)]
    for name in ("features", "logits"):
        rows = torch.cat([getattr(outputs, name) for outputs in alone])
        torch.testing.assert_close(getattr(together, name), rows)


def test_wrapping_sets_eval_mode_and_training_mode_is_rejected_later(net):
    net.train()
    model = TorchModel(net)
    assert not any(part.training for part in net.modules())
    model(IMAGES)
    net.norm.train()
    with pytest.raises(CasterError, match=r"put into training mode: call eval\(\)"):
        model(IMAGES)
    net.eval()
    model(IMAGES)


def changed_weight(net):
    with torch.no_grad():
        net.conv.weight[0, 0, 0, 0] += 1e-6


def changed_statistics(net):
    net.norm.running_mean[0] += 1e-6


def changed_hidden_buffer(net):
    net.conv.scale[1] = 3.0


CHANGES = {
    "weight": changed_weight,
    "statistics": changed_statistics,
    "a buffer no file holds": changed_hidden_buffer,
    "stride": lambda net: setattr(net.conv, "stride", (1, 1)),
    "eps": lambda net: setattr(net.norm, "eps", 1e-3),
    "dropout": lambda net: setattr(net.drop, "p", 0.1),
    "activation": lambda net: setattr(net, "act", nn.GELU()),
    "one layer more": lambda net: net.append(nn.Identity()),
    "one weight less": lambda net: setattr(net.fc, "bias", None),
    "precision": lambda net: net.half(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_verify_detects_changes(net, change):
    net.conv.register_buffer("scale", torch.ones(2), persistent=False)
    model = TorchModel(net)
    model(IMAGES)
    model.verify()
    change(net)
    with pytest.raises(
        CasterError, match=r"Sequential was changed while it was in use.*or wrap it"
    ):
        model.verify()


def test_verify_accepts_restored_weights(net):
    model = TorchModel(net)
    before = copy.deepcopy(net.state_dict())
    changed_weight(net)
    with pytest.raises(CasterError):
        model.verify()
    net.load_state_dict(before)
    model.verify()


# --- the digest ------------------------------------------------------------------------------


def test_the_digest_depends_on_weights_and_layers_only(net):
    digest = TorchModel(net).sha256
    used = TorchModel(small())
    used(IMAGES)
    assert used.sha256 == digest
    assert used.head == "fc"
    for same in (
        TorchModel(copy.deepcopy(net)),
        TorchModel(net, name="another name"),
        TorchModel(net, device="cpu"),
        TorchModel(net, bf16=True),
        TorchModel(small(), channels_last=True),
        TorchModel(small().requires_grad_(False)),
        TorchModel(small().train()),
    ):
        assert same.sha256 == digest


def test_other_models_have_other_digests(net):
    torch.manual_seed(5)
    others = {"another head": TorchModel(net, head="fc"), "and another": TorchModel(net, head="")}
    for name, change in CHANGES.items():
        if "no file" not in name:
            other = small()
            change(other)
            others[name] = TorchModel(other)
    digests = {model.sha256 for model in others.values()} | {TorchModel(net).sha256}
    assert len(digests) == len(others) + 1


def test_the_digest_is_stable():
    """Another digest would invalidate every state fitted so far."""
    net = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
    net.register_buffer("count", torch.tensor(3))
    weight, bias = (value.detach().numpy().tobytes() for value in net.parameters())
    content = (
        b" Sequential()\n"
        b"0 Linear(in_features=2, out_features=1, bias=True)\n"
        b"1 ReLU()\n"
        b"0.weight torch.float32 (1, 2)\n" + weight + b"0.bias torch.float32 (1,)\n" + bias
    )
    content += b"count torch.int64 ()\n" + (3).to_bytes(8, "little")
    for head in (None, "0"):
        whole = f"head {head}\n {{}}\n{hashlib.sha256(content).hexdigest()}"
        assert TorchModel(net, head=head).sha256 == hashlib.sha256(whole.encode()).hexdigest()


@pytest.mark.parametrize("attributes", [{"scale": 2.0}, {"act": torch.relu}, {"act": torch.tanh}])
def test_the_digest_covers_plain_attributes(attributes):
    class Scaled(nn.Module):
        def __init__(self, scale=1.0, act=torch.sigmoid):
            super().__init__()
            self.fc, self.scale, self.act = nn.Linear(2, 2), scale, act
            nn.init.ones_(self.fc.weight)
            nn.init.ones_(self.fc.bias)

        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1  # verify must ignore this
            return self.fc(self.act(self.scale * x))

    plain, other = TorchModel(Scaled()), TorchModel(Scaled(**attributes))
    assert plain.sha256 == TorchModel(Scaled()).sha256 != other.sha256
    plain(torch.ones(1, 2))
    plain.verify()


def test_threads_get_the_features_of_their_own_batch(net):
    model = TorchModel(net)
    batches = [torch.full_like(IMAGES, float(i)) for i in range(8)]
    expected = [model(batch).features for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            for found, right in zip(pool.map(model, batches), expected, strict=True):
                assert torch.equal(found.features, right)


def test_the_digest_covers_buffers_of_every_kind():
    def holding(**buffers):
        net = nn.Linear(2, 2)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        for name, value in buffers.items():
            net.register_buffer(name, value)
        return TorchModel(net).sha256

    kinds = [
        {},
        {"a": torch.zeros(0, 3)},
        {"a": torch.zeros(3, 0)},
        {"a": torch.tensor(0)},
        {"a": torch.tensor([0])},
        {"a": torch.tensor(True)},
        {"a": torch.tensor(False)},
        {"a": torch.zeros(2, dtype=torch.complex64)},
        {"a": torch.ones(2, dtype=torch.bfloat16)},
        {"a": torch.arange(6).reshape(2, 3)},
        {"a": torch.arange(6).reshape(3, 2)},
        {"a": torch.arange(6).reshape(2, 3).T},
        {"b": torch.arange(6).reshape(3, 2)},
    ]
    assert len({holding(**kind) for kind in kinds}) == len(kinds)
    transposed = torch.arange(6).reshape(2, 3).T
    assert holding(a=transposed) == holding(a=transposed.contiguous())


def test_shared_parameters_and_layers():
    shared = nn.Linear(6, 6)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 6), shared, nn.ReLU(), shared)
    model = TorchModel(net)
    outputs = model(IMAGES)
    assert model.head == "2"  # its first name
    with torch.no_grad():
        assert torch.equal(outputs.features, net[:4](IMAGES))  # its last input
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    model = TorchModel(tied)
    model(torch.randn(2, 6))
    assert model.head == "1"
    tied[1].weight = nn.Parameter(tied[0].weight.detach().clone())
    with pytest.raises(CasterError, match="was changed"):
        model.verify()


def test_a_module_without_parameters():
    net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten())
    assert rejection(net).endswith("it has no Linear")
    net.append(nn.Identity())
    model = TorchModel(net, head="2")
    outputs = model(IMAGES)
    expected = IMAGES.reshape(4, 3, 4, 8, 4, 8).mean((3, 5)).flatten(1)
    torch.testing.assert_close(outputs.features, expected)
    assert torch.equal(outputs.logits, outputs.features)
    assert len(model.sha256) == 64
    model.verify()


# --- precision, memory, gradients ------------------------------------------------------------


def test_bf16_is_close_and_returned_as_float32(net):
    exact, rounded = TorchModel(net)(IMAGES), TorchModel(net, bf16=True)(IMAGES)
    for name in ("features", "logits"):
        a, b = getattr(exact, name), getattr(rounded, name)
        assert a.dtype == b.dtype == torch.float32
        assert not torch.equal(a, b)
        assert torch.equal(b, b.bfloat16().float())
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03 * float(a.abs().max()))
    assert next(net.parameters()).dtype == torch.float32


def test_bf16_finds_the_same_classifier():
    net = from_timm("vit_base_patch16_224")
    model = TorchModel(net, bf16=True)
    logits = model(IMAGES).logits
    assert model.head == "head"
    torch.testing.assert_close(logits, answer(net), rtol=0.1, atol=0.1)


def test_channels_last_gives_the_same_numbers(net):
    expected = TorchModel(small())(IMAGES)
    model = TorchModel(net, channels_last=True)
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not net.conv.weight.is_contiguous()
    seen = []
    net.conv.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    outputs = model(IMAGES)
    assert all(given.is_contiguous(memory_format=torch.channels_last) for given in seen)
    torch.testing.assert_close(outputs.features, expected.features)
    torch.testing.assert_close(outputs.logits, expected.logits)
    rows = nn.Linear(4, 3)  # a batch that has no channels
    TorchModel(rows, channels_last=True)(torch.zeros(2, 4))


def test_other_precisions_are_returned_as_float32():
    for dtype in (torch.float64, torch.bfloat16):
        outputs = TorchModel(small().to(dtype))(IMAGES.to(dtype))
        assert outputs.features.dtype == outputs.logits.dtype == torch.float32


def test_gradients_are_never_recorded(net):
    images = IMAGES.clone().requires_grad_()
    with torch.enable_grad():
        outputs = TorchModel(net)(images)
    for values in (outputs.features, outputs.logits):
        assert not values.requires_grad
        assert values.grad_fn is None
    assert images.grad is None
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")


# --- what goes in ----------------------------------------------------------------------------


def test_arrays_of_any_kind(net):
    model = TorchModel(net)
    expected = model(IMAGES)
    frozen = IMAGES.numpy().copy()
    frozen.flags.writeable = False
    for batch in (IMAGES.numpy(), frozen, IMAGES.tolist(), np.asfortranarray(IMAGES.numpy())):
        outputs = model(batch)
        assert isinstance(outputs.features, torch.Tensor)
        torch.testing.assert_close(outputs.features, expected.features)
        torch.testing.assert_close(outputs.logits, expected.logits)
    assert np.array_equal(frozen, IMAGES.numpy())


def test_batches_are_not_written_to():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, CLASSES))
    images = IMAGES.clone()
    TorchModel(net)(images)
    assert torch.equal(images, IMAGES)


@pytest.mark.parametrize(
    "batch", [IMAGES[:0], np.zeros((0, 3, 32, 32), np.float32), [], 1.0], ids=type
)
def test_batches_without_samples(net, batch):
    assert "at least one sample" in rejection(net, batch)


def test_preprocessing_must_suit_torch(net):
    stated = Preprocessing.in_graph("NCHW", "float32")
    assert TorchModel(net, preprocessing=stated).preprocessing is stated
    assert TorchModel(net).preprocessing is None
    message = rejection(net, preprocessing=Preprocessing.in_graph("NHWC", "float32"))
    assert "needs the layout NCHW" in message


def test_missing_devices(net):
    assert "the model cannot be moved to 'abacus'" in rejection(net, device="abacus")
    if not torch.cuda.is_available():
        assert "the model cannot be moved to 'cuda'" in rejection(net, device="cuda")
    assert str(TorchModel(net).device) == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_digest_is_the_same_on_a_gpu(net):
    digest = TorchModel(copy.deepcopy(net)).sha256
    model = TorchModel(net, device="cuda")
    assert model.sha256 == digest
    assert model(IMAGES).features.device.type == "cuda"
    torch.testing.assert_close(
        model(IMAGES).logits.cpu(), TorchModel(small())(IMAGES).logits, rtol=1e-3, atol=1e-3
    )


# --- inputs and modules that torch alone would not handle ------------------------------------


def test_float64_is_converted_to_the_dtype_of_the_weights(net):
    model = TorchModel(net)
    assert torch.equal(model(IMAGES.double().numpy()).logits, model(IMAGES).logits)


@pytest.mark.parametrize("batch", [{"images": 1}, "images", [[1.0], [1.0, 2.0]]])
def test_batches_that_are_not_arrays_are_rejected(net, batch):
    with pytest.raises(CasterError, match="must be an array"):
        TorchModel(net)(batch)


def test_a_first_batch_of_nan_still_finds_the_head(net):
    model = TorchModel(net)
    model(torch.full_like(IMAGES, torch.nan))
    assert model.head == "fc"


def test_a_head_called_by_keyword_is_found():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, 3)

        def forward(self, x):
            return self.fc(input=x.flatten(1))

    images = torch.randn(2, 3, 2, 2)
    assert torch.equal(TorchModel(Keyword())(images).features, images.flatten(1))


def test_the_input_of_a_named_in_place_layer():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(12, 3)

        def forward(self, x):
            return self.fc(self.relu(x.flatten(1) * 1.0))

    images = torch.randn(2, 3, 2, 2)
    assert torch.equal(TorchModel(InPlace(), head="relu")(images).features, images.flatten(1))


def test_lazy_and_sparse_weights_are_rejected():
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    sparse = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    sparse[1].weight = nn.Parameter(sparse[1].weight.detach().to_sparse())
    for module in (lazy, sparse):
        with pytest.raises(CasterError, match="sparse or not initialised"):
            TorchModel(module)


def test_a_quantised_module_is_rejected():
    class Packed(nn.Linear):
        """Like torch's dynamically quantised layers: weights that are not tensors."""

        def get_extra_state(self):
            return (1, 2)

        def set_extra_state(self, state):
            pass

    with pytest.raises(CasterError, match="export the model to ONNX"):
        TorchModel(nn.Sequential(nn.Flatten(), Packed(4, 3)))
