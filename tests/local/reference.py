"""The classifier of jobs.py written down once more, in NumPy, with its gradients by hand."""

import numpy as np


def forward(w, image):
    x = image.astype(np.float32) / np.float32(16)
    h = np.maximum(x @ w["fc1.weight"] + w["fc1.bias"], 0)
    return x, h, h @ w["out.weight"] + w["out.bias"]


def loss_and_gradients(w, image, label):
    x, h, logits = forward(w, image)
    rows = np.arange(len(label))
    exp = np.exp(logits - logits.max(1, keepdims=True))
    share = exp / exp.sum(1, keepdims=True)
    loss = -np.log(share[rows, label]).mean()
    share[rows, label] -= 1
    dlogits = share / np.float32(len(label))
    dh = (dlogits @ w["out.weight"].T) * (h > 0)
    return float(loss), {
        "out.weight": h.T @ dlogits, "out.bias": dlogits.sum(0),
        "fc1.weight": x.T @ dh, "fc1.bias": dh.sum(0),
    }  # fmt: skip


def train(w, batches, lr, momentum=0.0, weight_decay=0.0, nesterov=False):
    """The loss of each step; `w` is updated."""
    speed = {name: np.zeros_like(value) for name, value in w.items()}
    losses = []
    for image, label in batches:
        loss, gradients = loss_and_gradients(w, image, label)
        losses.append(loss)
        for name, gradient in gradients.items():
            d = gradient + np.float32(weight_decay) * w[name]
            speed[name] = np.float32(momentum) * speed[name] + d
            step = d + np.float32(momentum) * speed[name] if nesterov else speed[name]
            w[name] = w[name] - np.float32(lr) * step
    return losses
