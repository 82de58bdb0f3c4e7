"""GPU benchmarks: every op compared with other libraries, and whole training steps.

    python -m benchmarks                               all ops, all providers
    python -m benchmarks rms_norm rope --provider liger ligermodels
    python -m benchmarks.plot                          plots of the newest files in results/
    python -m benchmarks.train_step --model llama-3-8b

Each op is one short script. It defines the inputs, the reference implementation, the minimum number of bytes or
floating-point operations, and the providers (libraries to compare). A provider is a function. To add one, write it next
to the others:

    @rms_norm.provider("mine")
    def mine(rows, columns):
        from my_kernels import my_rms_norm

        return lambda x, weight: my_rms_norm(x, weight, EPS)

Add a new script's name to `suite.SCRIPTS`. Every run writes one dated file per op to results/, including the rows in
which another provider is faster.
"""
