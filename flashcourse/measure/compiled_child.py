"""Compiles a kernel ahead of time, in a process of its own where Triton's interpreter is off.

Run as a file, so that the package is not imported: importing it would switch the interpreter on.
Reads one JSON request from standard input, writes one JSON answer to the file it names.
"""

import importlib.util
import json
import re
import subprocess
import sys
import traceback
from pathlib import Path


def load(path, name):
    spec = importlib.util.spec_from_file_location("kernel_to_compile", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_to_compile"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def source_of(kernel, arguments, constants):
    """What the launch would compile: the types of its arguments and what is known of them."""
    from triton.compiler import ASTSource

    signature, constexprs, attributes = {}, {}, {}
    values = iter(arguments)
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants.pop(name)
            continue
        argument = next(values)
        fixed = parameter.do_not_specialize
        if argument["kind"] == "none" or (argument.get("one") and not fixed):
            signature[name] = "constexpr"
            constexprs[(index,)] = 1 if argument.get("one") else None
            continue
        signature[name] = argument["kind"]
        if argument.get("divisible") and not fixed:
            attributes[(index,)] = [["tt.divisibility", 16]]
    if constants:
        raise TypeError(f"{kernel.__name__} has no constexpr parameter {sorted(constants)}")
    return ASTSource(kernel, signature, constexprs, attributes)


def target_of(name):
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64)


def registers_and_spills(compiled, target):
    """(registers a thread, bytes of spill a thread), read from the machine code."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        found = {
            key: int(n) for key, n in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)
        }
        return found["vgpr_count"], 4 * found["vgpr_spill_count"]
    from triton import knobs

    cubin = Path(sys.argv[1]).with_suffix(".cubin")
    cubin.write_bytes(compiled.asm["cubin"])
    report = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if usage is None:
        raise RuntimeError(f"cuobjdump does not say what the kernel uses: {report!r}")
    return int(usage[1]), int(usage[2])


def compile_one(kernel, job):
    import triton

    compiled = triton.compile(
        source_of(kernel, job["arguments"], dict(job["constants"])),
        target=target_of(job["target"]),
        options={"num_warps": job["num_warps"], "num_stages": job["num_stages"]},
    )
    registers, spilled = registers_and_spills(compiled, job["target"])
    text = {}
    if job["keep_text"]:
        assembly = compiled.asm.get("ptx", compiled.asm.get("amdgcn"))
        text = {"ttgir": str(compiled.asm["ttgir"]), "assembly": str(assembly)}
    return {
        "shared_bytes": int(compiled.metadata.shared),
        # A kernel whose warps take roles runs with more warps than the launch asked for.
        "threads": int(compiled.metadata.num_warps * compiled.metadata.target.warp_size),
        "registers": registers,
        "spilled_bytes": spilled,
        **text,
    }


def main():
    request = json.load(sys.stdin)
    kernel = load(request["module"], request["kernel"])
    answers = []
    for job in request["jobs"]:
        try:
            answers.append(compile_one(kernel, job))
        except Exception as error:  # the parent raises it again, with the job's name
            answers.append(
                {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
            )
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")


main()
