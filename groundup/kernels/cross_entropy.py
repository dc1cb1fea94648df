"""The head and what is computed from its logits, without ever holding the logits of all tokens.

    cross_entropy(hidden, weight, targets)     the loss of training: a sum, with gradients
    token_logps(hidden, weight, targets)       each token's log-probability, with gradients
    token_scores(hidden, weight, targets)      each token's loss, and whether it is the likeliest
    token_entropies(hidden, weight)            the entropy of each token's distribution

Logits (N, V) are the largest tensor of training: 2 GB for 16k tokens and 32k ids in float32. So
each function goes through the tokens in chunks, and frees a chunk's logits before the next one.

Shapes: N tokens, C n_embd, V vocab; hidden (N, C), weight (V, C), targets (N,) int64 or IGNORE.
Products are in the dtype of autocast, softmax and sums in float32.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from groundup.kernels.attention import compute_dtype
from groundup.tokens import IGNORE

# Elements of the largest block of logits. Constants, because another chunk size rounds differently.
# CPU: 24 MiB in float32 are enough for fast products; from 32 MiB on, glibc maps new pages each
# time. A GPU is fast with thousands of rows at once.
CHUNK_ELEMENTS = 3 * 2**21
GPU_CHUNK_ELEMENTS = 2**28


def reference_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `cross_entropy` returns, by its definition. Tests compare the two.

    To try another loss, change it here first, then the chunked version below (eager_chunk and
    fused_chunk), which must compute the same loss and its gradient:
    a soft cap is a line before the cross-entropy: logits = cap * (logits / cap).tanh();
    label smoothing is an argument of F.cross_entropy;
    a z-loss is a term of nats: + z * lse ** 2 for valid targets, where lse = logits.logsumexp(1).
    The gradient by the logits, softmax - one_hot, becomes (1 + 2 * z * lse) * softmax - one_hot.
    Where no gradient is asked for leave it out, so that validation losses stay comparable.
    DPO and RL share the chunks by `token_logps`."""
    logits = (hidden @ weight.T).float()  # (N, V)
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    return nats.sum(), nats.detach()


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss 0-d float32, nats (N,) float32 without gradient).

    nats = -log softmax(hidden @ weight.T)[target], 0 where the target is IGNORE; loss = their sum.
    Without a valid target the loss and its gradients are 0."""
    dtype = compute_dtype(hidden)
    with_grad = torch.is_grad_enabled()  # inside the function it is always off
    return ChunkedCrossEntropy.apply(hidden, weight, targets, dtype, with_grad)


def token_logps(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return log softmax(hidden @ weight.T / temperature)[target], (N,) float32, with gradients.

    0 where the target is IGNORE."""
    return ChunkedLogps.apply(hidden, weight, targets, compute_dtype(hidden), temperature)


@torch.no_grad()
def token_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (nats (N,) float32 as in `cross_entropy`, correct (N,) bool).

    correct: the target is the likeliest token. IGNORE is never correct."""
    nats = hidden.new_empty(len(hidden), dtype=torch.float32)
    correct = torch.empty_like(targets, dtype=torch.bool)
    for part, logits in chunks_of_logits(hidden, weight, compute_dtype(hidden)):
        nats[part], _ = softmax_cross_entropy(logits, targets[part])
        correct[part] = logits.argmax(dim=1) == targets[part]  # no id is IGNORE
    return nats, correct


@torch.no_grad()
def token_entropies(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy in nats of softmax(hidden @ weight.T / temperature), (N,) float32."""
    entropies = hidden.new_empty(len(hidden), dtype=torch.float32)
    for part, logits in chunks_of_logits(hidden, weight, compute_dtype(hidden)):
        # entropy = -sum over the vocabulary of p log p
        logps = logits.div_(temperature).log_softmax(dim=1)
        entropies[part] = -(logps.exp() * logps).sum(1)
    return entropies


def chunk_rows(vocab_size: int, device_type: str) -> int:
    """Return for how many tokens the logits are held at once."""
    if device_type == "cpu":
        return max(1, CHUNK_ELEMENTS // vocab_size)
    # A power of two, as most batches are: so no small chunk is left over.
    return 2 ** (max(1, GPU_CHUNK_ELEMENTS // vocab_size).bit_length() - 1)


def chunks(n_tokens: int, weight: Tensor) -> list[slice]:
    """Return the tokens of each chunk."""
    rows = chunk_rows(weight.shape[0], weight.device.type)
    return [slice(start, start + rows) for start in range(0, n_tokens, rows)]


def chunks_of_logits(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each chunk and their logits (n, V) float32, multiplied in `dtype`."""
    w = weight.to(dtype)  # once for all chunks
    # Each tensor is cast by hand: softmax and sums stay in float32.
    with torch.autocast(hidden.device.type, enabled=False):
        for part in chunks(len(hidden), weight):
            yield part, (hidden[part].to(dtype) @ w.T).float()


def compile_loss(device: torch.device) -> None:
    """Compile a chunk of the loss on a GPU: fewer kernels, and no logits in float32."""
    # On a CPU it would not be faster.
    if device.type == "cuda":
        ChunkedCrossEntropy.compiled_chunk = staticmethod(torch.compile(fused_chunk))


# ---- the loss of training ------------------------------------------------------------------------


class HeadGradients:
    """The gradients of a loss with respect to hidden states and head, added up chunk by chunk.

    Only those that autograd asks for: a frozen head costs nothing. any: whether it asks for one."""

    def __init__(self, ctx, hidden: Tensor, weight: Tensor, with_grad: bool) -> None:
        self.hidden = self.weight = None
        # Each row of `hidden` is in one chunk; every chunk adds to all of the head.
        if with_grad and ctx.needs_input_grad[0]:
            self.hidden = torch.empty_like(hidden)
        if with_grad and ctx.needs_input_grad[1]:
            self.weight = torch.zeros_like(weight, dtype=torch.float32)
        self.any = self.hidden is not None or self.weight is not None
        self.weight_dtype = weight.dtype

    def add(self, part: slice, grad_logits: Tensor, h: Tensor, w: Tensor) -> None:
        """Add those of the chunk `part`: grad_logits (n, V) of the logits h (n, C) @ w (V, C).T."""
        if self.hidden is not None:
            self.hidden[part] = grad_logits @ w
        if self.weight is not None:
            add_product(self.weight, grad_logits.T, h)

    def total(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of hidden and weight, in their dtypes."""
        return self.hidden, None if self.weight is None else self.weight.to(self.weight_dtype)


def scaled(gradients: tuple[Tensor | None, ...], factor: Tensor) -> list[Tensor | None]:
    """Return the gradients times the gradient of the loss, 0-d float32."""
    # Multiply in float32: rounded to bfloat16 the factor would be off by up to 0.4 %, and by
    # another amount for each number of ranks.
    return [None if g is None else (g.float() * factor).to(g.dtype) for g in gradients]


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and loss. Forward computes the gradients too, while a chunk's logits exist."""

    compiled_chunk: Callable | None = None  # set by compile_loss

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, with_grad: bool
    ) -> tuple[Tensor, Tensor]:
        loss = hidden.new_zeros((), dtype=torch.float32)
        nats = hidden.new_empty(len(hidden), dtype=torch.float32)
        w = weight.to(dtype)
        # The gradient of the loss that autograd passes to backward is one number, so everything
        # else can be computed here: backward only multiplies.
        gradients = HeadGradients(ctx, hidden, weight, with_grad)
        fused = ChunkedCrossEntropy.compiled_chunk if hidden.is_cuda and gradients.any else None

        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(len(hidden), weight):
                h, t = hidden[part].to(dtype), targets[part]
                if fused:
                    nats[part], grad_logits = fused(h, w, t)
                else:
                    nats[part], grad_logits = eager_chunk(h, w, t, gradients.any)
                loss += nats[part].sum()
                gradients.add(part, grad_logits, h, w)
                del grad_logits  # before the next chunk's logits are made

        ctx.save_for_backward(*gradients.total())
        ctx.mark_non_differentiable(nats)
        return loss, nats

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple:
        # of hidden and weight; targets, dtype and with_grad have none
        return *scaled(ctx.saved_tensors, grad), None, None, None


def eager_chunk(
    h: Tensor, w: Tensor, targets: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (nats (n,), gradient of their sum with respect to the logits (n, V)).

    h (n, C), w (V, C). learns: the gradient is asked for."""
    logits = (h @ w.T).float()
    nats, lse = softmax_cross_entropy(logits, targets)
    # An evaluation, or a loss of frozen weights, needs no gradient.
    if not learns:
        return nats, None
    valid = (targets != IGNORE).float()
    return nats, cross_entropy_gradient(logits, targets, lse, valid).to(h.dtype)


def fused_chunk(h: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return what eager_chunk returns, with a gradient always."""
    # Written to be compiled: a few kernels behind the product, none of which writes the logits in
    # float32.
    logits = (h @ w.T).float()
    index = targets.clamp(min=0).unsqueeze(1)  # IGNORE is negative, and masked below
    # -log softmax(logits)[target] = logsumexp(logits) - logits[target]
    lse = logits.logsumexp(dim=1, keepdim=True)
    valid = targets != IGNORE
    nats = (lse - logits.gather(1, index)).squeeze(1) * valid
    # d nats / d logits = softmax(logits) - one_hot(target)
    is_target = torch.arange(w.shape[0], device=w.device) == index
    grad = ((logits - lse).exp() - is_target.float()) * valid.unsqueeze(1)
    return nats, grad.to(h.dtype)


def softmax_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (nats (n,), log of the sum of exponentials (n, 1)) of logits (n, V) float32."""
    valid = targets != IGNORE
    index = targets.masked_fill(~valid, 0).unsqueeze(1)  # any id: it is multiplied by 0 below
    # On a CPU log_softmax is one kernel, and takes half the time of logsumexp's five passes.
    nats = -logits.log_softmax(dim=1).gather(1, index)
    return nats.squeeze(1) * valid, logits.gather(1, index) + nats


def cross_entropy_gradient(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of sum(scale * nats) with respect to the logits (n, V), in their place.

    It is scale * (softmax(logits) - one_hot(target))."""
    p = logits.sub_(lse).exp_()  # softmax, in the memory of the logits
    index = targets.clamp(min=0).unsqueeze(1)
    p.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=p.dtype))
    # Where the target is IGNORE the caller's scale is 0, so the row becomes 0.
    return p.mul_(scale.unsqueeze(1))


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a (V, n) @ b (n, C) to out (V, C) float32."""
    # A sum over many tokens can exceed float16's largest number, 65504, so it is in float32: within
    # a GPU's product too, and on a CPU by widening float16 first.
    if a.dtype == torch.float32:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    elif a.dtype == torch.float16:
        out += a.float() @ b.float()
    else:
        out += a @ b


# ---- log-probabilities with gradients ------------------------------------------------------------


class ChunkedLogps(torch.autograd.Function):
    """Head and log-softmax. Backward computes a chunk's logits once more."""

    # A token's gradient depends on a loss that is known only after all tokens: a preference, or a
    # policy's ratio. So forward cannot compute it while it has the logits.

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, temperature: float
    ) -> Tensor:
        logps = hidden.new_empty(len(hidden), dtype=torch.float32)
        lse = hidden.new_empty(len(hidden), 1, dtype=torch.float32)
        for part, logits in chunks_of_logits(hidden, weight, dtype):
            nats, lse[part] = softmax_cross_entropy(logits.div_(temperature), targets[part])
            logps[part] = -nats
        # No logits are kept: with lse, backward gets softmax from new ones without a second pass.
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.dtype, ctx.temperature = dtype, temperature
        return logps

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        # grad (N,) is of log-probabilities, and those are -nats: hence the minus in scale.
        hidden, weight, targets, lse = ctx.saved_tensors
        gradients = HeadGradients(ctx, hidden, weight, with_grad=True)
        w = weight.to(ctx.dtype)
        scale = -grad.float() * (targets != IGNORE) / ctx.temperature
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(len(hidden), weight):
                h, t = hidden[part].to(ctx.dtype), targets[part]
                # the logits once more, then as in ChunkedCrossEntropy
                logits = (h @ w.T).float().div_(ctx.temperature)
                grad_logits = cross_entropy_gradient(logits, t, lse[part], scale[part])
                gradients.add(part, grad_logits.to(ctx.dtype), h, w)
                del logits, grad_logits  # before the next chunk's logits are made
        # of hidden and weight; targets, dtype and temperature have none
        return *gradients.total(), None, None, None
