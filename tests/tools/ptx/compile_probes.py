"""Compile the kernels of `doctor` for one GPU architecture without a GPU. Prints the names of the compiled kernels.

Started by test_probes.py in a process of its own, because the tests import the kernels for the interpreter.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alspec.kernels.bench import probes


def main(capability: int) -> None:
    kernels = [
        (probes._increment_kernel, {"BLOCK": 256, "PDL": capability >= 90}),
        (probes._send_word_kernel, {}),
        (probes._exchange_packets_kernel, {"WORLD": 3, "PAD": 4}),
    ]
    types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "mail_ptr": "*i32", "buffers_ptr": "*i64", "result_ptr": "*i64"}
    for kernel, constants in kernels:
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
        assert compiled.asm["cubin"]
        print(kernel.__name__)


if __name__ == "__main__":
    main(int(sys.argv[1]))
