import torch

from ligermodels.kernels.linear import bias_gradient, input_gradient, weight_gradient


def saved_bytes(function, *inputs) -> int:
    """Bytes that `function` keeps for backward, each storage once, without parameters (the inputs of up to 2-D)."""
    parameters = {x.untyped_storage().data_ptr() for x in inputs if x is not None and x.ndim <= 2}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*inputs)
    return sum(size for address, size in kept.items() if address not in parameters)


def test_gradients_are_those_of_torch_linear():
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in [(2, 3, 5), (4, 5), (4,)])
    dy = torch.randn(3, 2, 4, dtype=torch.float64).transpose(0, 1)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), (x, weight, bias), dy)
    got = input_gradient(dy, weight), weight_gradient(dy, x), bias_gradient(dy)
    torch.testing.assert_close(got, expected)
