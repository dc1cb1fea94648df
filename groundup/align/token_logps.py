"""Log-probabilities of given tokens, with gradients, without ever holding all the logits: what preference training and
reinforcement learning train on.

    hidden = model(x, index=index)                                  # what the head reads, (N, C)
    logps = token_logps(hidden, model.lm_head.weight, targets)      # (N,), and any loss of these

Unlike model.cross_entropy, which forms its gradients in forward, the gradient of a token here depends on a loss that is
known only after all tokens: backward computes a block's logits once more.
"""

import torch
from torch import Tensor

from model import CHUNK_ELEMENTS, IGNORE, add_product, compute_dtype, cross_entropy_gradient, softmax_cross_entropy


def token_logps(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """log softmax(hidden @ weight.T)[target], (N,) float32, 0 where the target is IGNORE.

    hidden (N, C), weight (V, C), targets (N,) int64. The products are in the dtype of autocast, softmax in float32.
    Only gradients that are asked for are formed."""
    return ChunkedLogps.apply(hidden, weight, targets, compute_dtype(hidden))


class ChunkedLogps(torch.autograd.Function):
    """Head and log-softmax over blocks of tokens: (N, V) is (chunk, V) in memory, forward and backward."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        N = hidden.shape[0]
        logps, lse = (hidden.new_empty(N, dtype=torch.float32) for _ in range(2))
        w = weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(N, weight.shape[0]):
                nats, of_part = softmax_cross_entropy((hidden[part].to(dtype) @ w.T).float(), targets[part])
                logps[part], lse[part] = -nats, of_part.squeeze(1)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.dtype = dtype
        return logps

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        hidden, weight, targets, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        w, scale = weight.to(ctx.dtype), -grad.float() * (targets != IGNORE)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(hidden.shape[0], weight.shape[0]):
                h = hidden[part].to(ctx.dtype)
                logits = (h @ w.T).float()
                grad_logits = cross_entropy_gradient(logits, targets[part], lse[part].unsqueeze(1), scale[part])
                grad_logits = grad_logits.to(ctx.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits @ w
                if grad_weight is not None:
                    add_product(grad_weight, grad_logits.T, h)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def chunks(n_tokens: int, vocab_size: int) -> list[slice]:
    """Blocks of tokens whose logits are of a size that model.CHUNK_ELEMENTS explains."""
    chunk = max(1, CHUNK_ELEMENTS // vocab_size)
    return [slice(start, start + chunk) for start in range(0, n_tokens, chunk)]
