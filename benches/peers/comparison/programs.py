"""The programs of the peers: their requirements, and how to build and run them.

    Peer ── a row of the comparison: a program with arguments and environment
    Bench ─ this machine: finds, builds and runs the programs, and reports why one is missing
"""

import concurrent.futures
import dataclasses
import importlib.util
import os
import pathlib
import shutil
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent

FULL = {"--cold": "3", "--steady": "9", "--repeats": "5", "--pairs": "100000", "--thread-ms": "100"}
BRIEF = {"--cold": "2", "--steady": "5", "--repeats": "3", "--pairs": "50000", "--thread-ms": "50"}
QUICK = {"--cold": "1", "--steady": "1", "--repeats": "1", "--pairs": "1000", "--thread-ms": "5"}


class Missing(Exception):
    """A requirement of a peer is not available."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A row of the comparison."""

    name: str
    program: str
    arguments: tuple = ()
    environment: tuple = ()
    # Subcommand of symmalloc-peers: the cases of every peer, or cases of symmalloc only.
    command: str = "measure"
    # Maximum number of turns; None for no maximum. Rows without a bar would take time from rows with one.
    turns: int | None = None
    # Kind and numbers of blocks to measure. Free blocks run in a separate process, because live blocks leave traces in
    # the host's heap that would distort their results, and vice versa.
    scale: tuple = ()

    def is_wanted(self, words):
        return not words or any(word.strip().lower() in self.name.lower() for word in words.split(","))


def ours(name, interface, conf="", prefetch_mib=0, **more):
    arguments = ("--interface", interface, "--conf", conf)
    if prefetch_mib:
        arguments += ("--prefetch-mib", str(prefetch_mib))
    return Peer(name, "symmalloc-peers", arguments, **more)


# Threads that share nothing, which show the scaling of this machine.
PROCESSORS = Peer("processors", "symmalloc-peers", command="processors", turns=3)


def peers(without_device):
    """Returns every peer, in the order of the table."""
    if without_device:
        return [
            ours("symmalloc, simulated", "simulated"),
            ours("symmalloc, simulated, shared streams", "simulated", "streams:shared"),
            Peer("malloc", "malloc"),
            *scale("symmalloc scale", "simulated"),
            PROCESSORS,
        ]
    return [
        ours("symmalloc", "buffer"),
        ours("symmalloc, counted", "counted", turns=2),
        ours("symmalloc, handles", "handle", turns=2),
        ours("symmalloc, C", "library"),
        ours("symmalloc, shared streams", "buffer", "streams:shared"),
        ours("symmalloc, prefetch", "buffer", prefetch_mib=64, turns=2),
        torch("PyTorch", "expandable_segments:False"),
        torch("PyTorch expandable", "expandable_segments:True"),
        Peer("RMM pool", "rmm", ("--resource", "pool")),
        Peer("RMM arena", "rmm", ("--resource", "arena")),
        Peer("RMM async", "rmm", ("--resource", "async")),
        Peer("cudaMallocAsync", "cuda_async", turns=2),
        *scale("symmalloc scale", "buffer"),
        *scale("symmalloc scale, handles", "handle", live="1000,1000000"),
        PROCESSORS,
    ]


def scale(name, interface, live="1000,10000,100000,1000000,10000000", free="1000,10000,100000,1000000"):
    """Returns peers for many live and many free blocks, under one name."""
    sorts = (("--live", live), ("--free", free))
    return [ours(name, interface, command="scale", turns=1, scale=sort) for sort in sorts]


def torch(name, conf):
    # Each version of PyTorch reads only one of the two variables.
    return Peer(name, "torch", (), (("PYTORCH_CUDA_ALLOC_CONF", conf), ("PYTORCH_ALLOC_CONF", conf)))


@dataclasses.dataclass(frozen=True)
class Turn:
    """The result of one run of a peer's program."""

    lines: list
    seconds: float
    failure: str


class Bench:
    """The machine and the programs built on it."""

    def __init__(self, out, program=None, library=None):
        self.out = out
        self.library = library
        self.versions = {}
        self.built = {}
        if program:
            self.built["symmalloc-peers"] = pathlib.Path(program).resolve()

    # Building

    def write_jobs(self, job_filter):
        """Writes the recorded jobs for all programs, and returns the figures of the jobs."""
        program = self.built.setdefault("symmalloc-peers", None) or self.cargo("symmalloc-peers", "symmalloc-peers")
        self.built["symmalloc-peers"] = program
        words = [program, "jobs", self.out / "jobs", "--filter", job_filter]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()

    def build(self, wanted):
        """Builds the programs of the peers in parallel, and returns the reason for each missing peer."""
        recipes = {"torch": self.build_torch, "rmm": self.build_rmm, "cuda_async": self.build_cuda_async}
        recipes["malloc"] = lambda: self.compile("malloc", [], [])
        names = {peer.program for peer in wanted} & recipes.keys()
        reasons = {}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for name, building in {name: pool.submit(recipes[name]) for name in sorted(names)}.items():
                try:
                    self.built[name] = building.result()
                except Missing as reason:
                    reasons[name] = str(reason)
        missing = {peer.name: reasons[peer.program] for peer in wanted if peer.program in reasons}
        for peer in wanted:
            if "library" in peer.arguments:
                try:
                    self.library = self.find_library()
                except Missing as reason:
                    missing[peer.name] = str(reason)
        return missing

    def cargo(self, package, artifact):
        if not shutil.which("cargo"):
            raise Missing(f"cargo is not available to build {package}: install it, or pass the path of {artifact}")
        words = ["cargo", "build", "--profile", "shipped", "--locked", "-p", package]
        self.command(words, f"build-{package}", cwd=ROOT)
        folder = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        return folder / "shipped" / artifact

    def find_library(self):
        if self.library:
            path = pathlib.Path(self.library).resolve()
            if not path.exists():
                raise Missing(f"{path} does not exist")
            return path
        if not (ROOT / "crates/symmalloc-torch/Cargo.toml").exists():
            raise Missing("crates/symmalloc-torch is not in this tree")
        return self.cargo("symmalloc-torch", "libsymmalloc_torch.so")

    def build_torch(self):
        folder = package_folder("torch")
        version = (folder / "version.py").read_text(encoding="utf-8") if (folder / "version.py").exists() else ""
        self.versions["PyTorch"] = text_after(version, "__version__ = ")
        cuda = cuda_folder()
        return self.compile(
            "torch",
            [folder / "include", cuda / "include"],
            [f"-L{folder / 'lib'}", "-lc10_cuda", "-lc10", *runtime(cuda), f"-Wl,-rpath,{folder / 'lib'}"],
        )

    def build_rmm(self):
        folder, logger = package_folder("librmm"), package_folder("rapids_logger")
        self.versions["RMM"] = (folder / "VERSION").read_text(encoding="utf-8").strip()
        cuda = cuda_folder()
        libraries = [folder / "lib64" / "librmm.so", logger / "lib64" / "librapids_logger.so"]
        return self.compile(
            "rmm",
            [folder / "include", folder / "include" / "rapids", logger / "include", cuda / "include"],
            [*libraries, *runtime(cuda), *(f"-Wl,-rpath,{library.parent}" for library in libraries)],
        )

    def build_cuda_async(self):
        cuda = cuda_folder()
        return self.compile("cuda_async", [cuda / "include"], runtime(cuda))

    def compile(self, name, includes, libraries):
        compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
        if not compiler:
            raise Missing("no C++ compiler is available: install one or set CXX")
        program = self.out / name
        words = [compiler, "-O2", "-DNDEBUG", "-std=c++20", HERE / "cpp" / f"{name}.cpp", "-o", program]
        # Included as system headers to suppress their warnings.
        words += [word for folder in includes for word in ("-isystem", folder)]
        self.command([*words, *libraries, "-lpthread"], f"build-{name}")
        return program

    def command(self, words, log, cwd=None):
        log = self.out / f"{log}.log"
        with open(log, "w", encoding="utf-8") as text:
            done = subprocess.run(words, stdout=text, stderr=subprocess.STDOUT, cwd=cwd, check=False)
        if done.returncode != 0:
            raise Missing(f"the build failed: {last_line(log, 'error')}")

    # Running

    def measure(self, peer, amounts, timeout):
        """Runs one turn of a peer."""
        words = [self.built[peer.program]]
        if peer.program == "symmalloc-peers":
            words.append(peer.command)
        words += [*peer.arguments, *self.choice(peer, amounts), *words_of(amounts)]
        if "library" in peer.arguments:
            words += ["--library", self.library]
        log = self.out / f"run-{peer.name.replace(', ', '-').replace(' ', '-')}.log"
        start = time.monotonic()
        with open(log, "w", encoding="utf-8") as errors:
            try:
                done = subprocess.run(
                    words,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    timeout=timeout,
                    check=False,
                    env=os.environ | dict(peer.environment),
                )
                printed, failure = done.stdout, None if done.returncode == 0 else f"exit status {done.returncode}"
            except subprocess.TimeoutExpired as late:
                printed, failure = text_of(late.stdout), f"it took more than {timeout} s"
        lines = [line for line in printed.splitlines() if line.endswith("]}")]
        if failure:
            failure = f"{failure}: {last_line(log)}"
        return Turn(lines, time.monotonic() - start, failure)

    def choice(self, peer, amounts):
        """Returns the options that select what a program measures."""
        if peer.command == "processors":
            return []
        if peer.command == "scale":
            return ["--peer", peer.name, peer.scale[0], "1000" if amounts is QUICK else peer.scale[1]]
        return ["--peer", peer.name, "--jobs", self.out / "jobs"]


def words_of(amounts):
    return [word for amount in amounts.items() for word in amount]


def package_folder(name):
    """Returns the folder of a Python package, without importing it."""
    found = importlib.util.find_spec(name)
    if not found or not found.submodule_search_locations:
        raise Missing(f"the Python package {name} is not installed (pip install {name}, or set PYTHONPATH)")
    return pathlib.Path(next(iter(found.submodule_search_locations)))


def cuda_folder():
    """Returns a folder with the CUDA headers and runtime library, of the toolkit or of Python's nvidia packages."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvidia = importlib.util.find_spec("nvidia")
    for place in nvidia.submodule_search_locations if nvidia else ():
        places += sorted(pathlib.Path(place).glob("cu[0-9]*"), reverse=True)
    for place in filter(None, places):
        if (pathlib.Path(place) / "include" / "cuda_runtime.h").exists():
            return pathlib.Path(place)
    raise Missing("the CUDA headers are not available: set CUDA_HOME")


def runtime(cuda):
    """Returns the linker options for the CUDA runtime library."""
    for folder in (cuda / "lib64", cuda / "lib"):
        for library in sorted(folder.glob("libcudart.so*")):
            return [library, f"-Wl,-rpath,{folder}"]
    raise Missing(f"libcudart.so is not in {cuda}")


def text_of(printed):
    """Returns the output before a timeout as text. It is bytes even if text was requested."""
    return printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""


def text_after(text, mark):
    return next((line.partition(mark)[2].strip("'\"") for line in text.splitlines() if mark in line), "")


def last_line(log, word=""):
    """Returns the first line of a log that contains a word, or else its last line, as the reason of a failure."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if word and word in line]
    return (named or lines[-1:] or [f"see {log}"])[0][:300]
