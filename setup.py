"""Builds flatshard._core from csrc/. Everything that is not C stands in pyproject.toml.

Plain setuptools, with a build_ext of our own that compiles sources in parallel, keeps one folder of
objects per set of flags, and compiles again only what is older than a file it included.

Variables read here, all optional:

    CC, CFLAGS, LDFLAGS        as everywhere; our own flags come after them
    FLATSHARD_WERROR=1         warnings on, and errors
    FLATSHARD_DEBUG=1          for a debugger: -Og -g3
    FLATSHARD_SANITIZE=LIST    gcc or clang sanitizers, e.g. address,undefined
    FLATSHARD_THREADS_ONLY=1   leaves out worlds of processes, as on systems other than Linux
    FLATSHARD_MANYLINUX=1      for a wheel: links to the versions of glibc's functions of 2.28
    FLATSHARD_CUDA=1 or 0      the library of device "cuda", libfs_cuda.so, must be built, by nvcc,
                               or must not. Unset: where nvcc is found (half a minute of a core),
                               but for a build in place (editable, --inplace)
"""

import concurrent.futures
import glob
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wstrict-prototypes", "-Werror"]

# Ours come last: flags injected through CFLAGS must not change arithmetic. Kernels choose their
# instruction set with pragmas in the source, so one set of flags serves every file.
CFLAGS = [
    "-std=c11",
    "-O3",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
    "-Werror=implicit-function-declaration",  # a function that some Python or libc lacks
]

# Flags that would make the linker add start-up code which turns subnormal numbers off for the whole
# process, or that no later flag takes back.
UNSAFE = {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-ffinite-math-only"}

NO_COMPILER = (
    "no C compiler: '{}' is not on the path. Install one (Debian, Ubuntu: apt install "
    "build-essential; Fedora: dnf install gcc; macOS: xcode-select --install), or name another: "
    "CC=clang"
)
NO_C_HEADERS = (
    "the C library's headers are missing (Debian, Ubuntu: apt install libc6-dev; Fedora: dnf "
    "install glibc-devel)"
)
NO_PYTHON_HEADERS = (
    f"Python's headers are missing for {sys.executable}: install the development package of "
    f"Python {sys.version_info[0]}.{sys.version_info[1]} (Debian, Ubuntu: apt install python3-dev; "
    "Fedora: dnf install python3-devel), or use a Python that has them"
)


def switch(name):
    """The value of a build variable; None when unset, empty or 0."""
    value = os.environ.get(name, "")
    return None if value in ("", "0") else value


def build_flags():
    """Compile flags, link flags, macros and sources chosen by the environment."""
    compile_args = list(CFLAGS)
    link_args = ["-pthread", "-lm"]
    macros = []
    sources = sorted(glob.glob("csrc/**/*.c", recursive=True))
    if switch("FLATSHARD_WERROR"):
        compile_args += WARNINGS
    if switch("FLATSHARD_DEBUG"):
        compile_args += ["-Og", "-g3"]
    sanitizers = switch("FLATSHARD_SANITIZE")
    if sanitizers:
        compile_args += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g", "-O1"]
        link_args += [f"-fsanitize={sanitizers}"]
    if switch("FLATSHARD_THREADS_ONLY"):
        macros.append(("FS_THREADS_ONLY", "1"))
    if switch("FLATSHARD_MANYLINUX"):
        compile_args += ["-include", "tools/glibc_2_28.h"]
        sources.append("tools/glibc_2_28.c")
    if sys.platform.startswith("linux"):
        link_args.append("-ldl")
    return compile_args, link_args, macros, sources


def build_id():
    """A hash of every source and header, and of this file: what a plugin must match."""
    digest = hashlib.sha256()
    for path in ["setup.py", *sorted(glob.glob("csrc/**/*.*", recursive=True))]:
        with open(path, "rb") as file:
            content = file.read()
        digest.update(f"{path.replace(os.sep, '/')} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def dependencies(depfile):
    """Files named by a make rule that the compiler wrote (-MMD); None when there is none."""
    try:
        with open(depfile, encoding="utf-8", errors="surrogateescape") as file:
            rule = file.read().replace("\\\n", " ")
    except FileNotFoundError:
        return None
    _, _, names = rule.partition(": ")
    found = re.findall(r"(?:\\.|[^\s\\])+", names)
    return [re.sub(r"\\(.)", r"\1", name).replace("$$", "$") for name in found]


def is_current(target, record, inputs):
    """Is target newer than all inputs, and was it made by the same command?"""
    try:
        with open(target + ".cmd", encoding="utf-8", errors="surrogateescape") as file:
            if file.read() != record:
                return False
        made = os.stat(target).st_mtime_ns
        return all(os.stat(name).st_mtime_ns < made for name in inputs)
    except OSError:
        return False


def write_record(target, record):
    with open(target + ".cmd", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(record)


class BuildCore(build_ext):
    """build_ext with parallel, incremental compiling and errors that say the cure."""

    def run(self):
        if self.editable_mode:
            # An editable install gives a new temporary folder each time; objects are worth keeping.
            name = f"temp.{self.plat_name}-{sys.implementation.cache_tag}"
            self.build_temp = os.path.join("build", name)
        super().run()
        self.build_cuda(os.path.dirname(self.get_ext_fullpath("flatshard._core")))

    def build_cuda(self, folder):
        """Puts libfs_cuda.so beside the core, or says why there is none."""
        asked = os.environ.get("FLATSHARD_CUDA", "")
        if asked == "0" or not os.path.isdir("csrc/cuda"):
            return
        if asked in ("", "auto") and (self.inplace or self.editable_mode):
            return
        tool = load_tool("cuda")
        nvcc = tool.find_nvcc()
        if nvcc is None:
            cause = tool.home_fault() or "it is not in CUDA_HOME, not on the path, and no package"
            if asked == "1":
                raise CompileError(f"FLATSHARD_CUDA=1 needs nvcc: {cause}")
            print(f"flatshard: without libfs_cuda.so: no nvcc ({cause})")
            return
        architectures = tool.known(nvcc)
        print(f"flatshard: compiling CUDA sources for {', '.join(architectures)} by {nvcc}")
        try:
            library = tool.compile_all(
                nvcc, tool.ROOT / "build" / "cuda", architectures, build_id()
            )
        except SystemExit as error:
            if asked == "1":
                raise CompileError(f"nvcc could not compile csrc/cuda:\n{error}") from None
            print(f"flatshard: without libfs_cuda.so: nvcc could not compile it:\n{error}")
            return
        target = os.path.join(folder, "libfs_cuda.so")
        if os.path.exists(target):
            os.unlink(target)  # a process may have it mapped: never write into it
        shutil.copy(library, target)

    def build_extension(self, ext):
        if self.compiler.compiler_type != "unix":
            raise PlatformError(
                "flatshard is built by gcc or clang on a Unix-like system; on Windows, build and "
                "run it in the Windows Subsystem for Linux"
            )
        dropped = sorted(UNSAFE.intersection(self.compiler.compiler_so + self.compiler.linker_so))
        if dropped:
            print(f"flatshard: building without {' '.join(dropped)}: it would change results")
        for name in ("preprocessor", "compiler", "compiler_so", "linker_so"):
            words = getattr(self.compiler, name) or []
            setattr(self.compiler, name, [word for word in words if word not in UNSAFE])
        includes = [f"-I{path}" for path in [*ext.include_dirs, *self.include_dirs]]
        macros = [f"-D{name}={value}" for name, value in ext.define_macros]
        # Only the binding sees Python's headers: the core's objects serve every Python here.
        compiler, flags = self.compiler.compiler_so, ext.extra_compile_args
        self.commands = {
            False: [*compiler, *macros, *flags],
            True: [*compiler, *macros, *includes, *flags],
        }
        self.id_macro = f'-DFS_BUILD_ID="{build_id()}"'
        self.folders = {}
        objects = self.compile_all(ext.sources)
        self.link_if_older(ext, objects)

    def compile_all(self, sources):
        self.check_toolchain()
        stale = [source for source in sources if self.force or not self.object_current(source)]
        if stale:
            print(f"flatshard: compiling {len(stale)} of {len(sources)} C files", flush=True)
        workers = self.parallel if isinstance(self.parallel, int) else usable_cores()
        with concurrent.futures.ThreadPoolExecutor(max_workers=workers) as pool:
            errors = [error for error in pool.map(self.compile_one, stale) if error]
        if errors:
            raise CompileError("\n".join(errors))
        return [self.object_path(source) for source in sources]

    def object_path(self, source):
        """Objects lie by the command and compiler that made them."""
        binding = is_binding(source)
        if binding not in self.folders:
            words = [*self.commands[binding], self.compiler_version()]
            digest = hashlib.sha256("\0".join(words).encode(errors="surrogateescape"))
            above = os.path.dirname(self.build_temp.rstrip(os.sep))
            self.folders[binding] = os.path.join(above, "objects", digest.hexdigest()[:12])
        return os.path.join(self.folders[binding], os.path.splitext(source)[0] + ".o")

    def object_command(self, source):
        """The command for one source. The build id goes only to files that use it, so that an edit
        elsewhere does not compile everything again."""
        with open(source, encoding="utf-8") as file:
            macro = [self.id_macro] if "FS_BUILD_ID" in file.read() else []
        target = self.object_path(source)
        written = ["-MMD", "-MF", target[:-2] + ".d", "-c", source, "-o", target]
        return [*self.commands[is_binding(source)], *macro, *written]

    def object_current(self, source):
        target = self.object_path(source)
        inputs = dependencies(target[:-2] + ".d")
        return inputs is not None and is_current(
            target, "\n".join(self.object_command(source)), inputs
        )

    def compile_one(self, source):
        """Compiles one source; returns the sentence of its failure, or None."""
        target = self.object_path(source)
        command = self.object_command(source)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        done = run(command)
        if done.stdout:
            print(done.stdout, file=sys.stderr, end="", flush=True)
        if done.returncode != 0:
            return f"the compiler could not compile {source} (its words are above)"
        write_record(target, "\n".join(command))
        return None

    def link_if_older(self, ext, objects):
        library = self.get_ext_fullpath(ext.name)
        record = "\n".join([*self.compiler.linker_so, library, *objects, *ext.extra_link_args])
        stamp = os.path.join(self.build_temp, ext.name)
        if not self.force and os.path.exists(library) and is_current(stamp, record, objects):
            return
        os.makedirs(os.path.dirname(library) or ".", exist_ok=True)
        if os.path.exists(library):
            os.unlink(library)  # a process may have it mapped: never write into it
        self.compiler.link_shared_object(
            objects, library, extra_postargs=ext.extra_link_args, build_temp=self.build_temp
        )
        os.makedirs(self.build_temp, exist_ok=True)
        with open(stamp, "w"):
            pass
        write_record(stamp, record)

    def check_toolchain(self):
        """Says in a sentence what is missing, before a compile fails with a page of text."""
        for program in compiler_programs(self.compiler.compiler_so):
            if shutil.which(program) is None:
                raise CompileError(NO_COMPILER.format(program))
        for header, cure in (("stdio.h", NO_C_HEADERS), ("Python.h", NO_PYTHON_HEADERS)):
            with tempfile.TemporaryDirectory() as folder:
                probe = os.path.join(folder, "probe.c")
                with open(probe, "w") as file:
                    file.write(f"#include <{header}>\n")
                done = run([*self.commands[True], "-E", probe, "-o", os.devnull])
            if done.returncode != 0:
                missing = re.search(rf"{re.escape(header)}.*(No such file|not found)", done.stdout)
                raise CompileError(cure if missing else f"the C compiler fails:\n{done.stdout}")

    def compiler_version(self):
        words = compiler_programs(self.compiler.compiler_so)
        return run([*words, "--version"]).stdout


def run(command):
    """Runs a command and keeps what it says, both streams together."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def is_binding(source):
    return source.replace(os.sep, "/").startswith("csrc/binding/")


def compiler_programs(command):
    """The compiler's own name, after a cache's where there is one."""
    return command[:2] if "ccache" in os.path.basename(command[0]) else command[:1]


def usable_cores():
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def load_tool(name):
    """A module of tools/, which is no package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tools", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"flatshard_tool_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numpy_headers():
    import numpy

    return numpy.get_include()


compile_args, link_args, macros, sources = build_flags()
core = Extension(
    "flatshard._core",
    sources=sources,
    depends=sorted(
        glob.glob("csrc/**/*.h", recursive=True) + glob.glob("csrc/**/*.inc", recursive=True)
    ),
    include_dirs=[numpy_headers()],
    define_macros=[
        ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
        ("NPY_TARGET_VERSION", "NPY_1_22_API_VERSION"),
        *macros,
    ],
    extra_compile_args=compile_args,
    extra_link_args=link_args,
)

if __name__ == "__main__":
    setup(ext_modules=[core], cmdclass={"build_ext": BuildCore})
