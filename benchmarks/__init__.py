"""Every op beside its peers, and whole training steps, on one GPU.

    python -m benchmarks                               all ops, all providers
    python -m benchmarks rms_norm rope --provider liger ligermodels
    python -m benchmarks.plot                          draws what results/ holds
    python -m benchmarks.train_step --model llama-3-8b

An op is one short script: what it is called with, what is right, the fewest bytes or operations, and its providers,
each a function. To add a provider, write one beside the others:

    @rms_norm.provider("mine")
    def mine(rows, columns):
        from my_kernels import my_rms_norm

        return lambda x, weight: my_rms_norm(x, weight, EPS)

A new script is named in `suite.SCRIPTS`. Every run leaves a dated file an op in results/, losing rows included.
"""
