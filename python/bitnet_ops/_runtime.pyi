"""Types of the compiled module `_runtime` (csrc/bindings*.cpp).

It knows no torch: dispatch state, CPU features, build facts, the SGLBITNT file reader, probes.
"""

from typing import TypedDict

from typing_extensions import Buffer

class KernelRow(TypedDict):
    isa: str
    description: str
    required: list[str]
    missing: list[str]
    available: bool

def isa() -> str:
    """Name of the ISA in use; chosen at the first call (BITNET_OPS_ISA, else the best)."""

def force_isa(name: str) -> None:
    """Use an available ISA; "" means automatic choice. RuntimeError lists the available ones."""

def available_isas() -> list[str]:
    """ISAs this CPU can execute, best first."""

def all_isas() -> list[str]:
    """ISAs in this build, best first."""

def cpu_features() -> dict[str, bool]:
    """Features that the CPU has and the operating system has enabled."""

def kernel_table() -> list[KernelRow]:
    """One row per ISA of this build, best first."""

def tile_lanes() -> int:
    """32-bit lanes of the CPU-specific weight layouts of the ISA in use: 4, 8 or 16."""

class LayoutRow(TypedDict):
    """Geometry of a layout of ternary weights (csrc/format/layout.h explains the terms)."""

    cpu_specific: bool  # made for the lanes of the kernels in use, never stored in a file
    bits: float  # of one weight
    fields: int  # weights in a byte; a row block has fields * lanes rows
    k_step: int  # consecutive inputs of a k-step, or of a canonical block
    k_multiple: int  # K is padded to a multiple of it
    max_in_features: int
    max_grouped_in_features: int  # with scales of groups
    dimensions: int  # of its tensor

def layouts() -> dict[str, LayoutRow]:
    """The layouts of ternary weights by name: "canonical" (that of files), "2bit", "1.6bit"."""

def packed_shape(
    layout: str, out_features: int, in_features: int, lanes: int = 0
) -> tuple[int, ...]:
    """Shape of the uint8 tensor of an N x K matrix in `layout`; lanes 0: of the ISA in use.

    Canonical [N, row bytes], "2bit" [row blocks, k-steps, 4 * lanes], "1.6bit" [row blocks,
    k-steps, lanes, 4]. Raises ValueError for another layout.
    """

def tuning() -> dict[str, str | int | bool | float | None]:
    """ "cpu": the row of the tuning table in use; the rest: its values or the environment's.

    "prefetch_bytes": how far ahead weights are prefetched; "head_bytes": a head's, for one token;
    "head_into_l2": those only into L2;
    "products": where the choice among the algorithms of a product comes from: "known" of this make
    of CPU, "measured" at the first product of each kind, or "usual" for the instruction set;
    "product": the row of the list of products that is taken wherever it can be, "" for none;
    "sum_tables": products of many tokens may use tables of sums.
    """

def product_names() -> list[str]:
    """Names of the rows of the lists of products, of every ISA of this build."""

def product_plan(
    layout: str,
    out_features: int,
    in_features: int,
    tokens: int,
    threads: int,
    grouped: bool = False,
) -> dict[str, str | int]:
    """How a product of one matrix is made with the ISA in use.

    "algorithm": its row of the list of products; into how many "token_blocks", "k_parts" and, at
    least, "row_parts" its work is cut. Raises ValueError for another layout, or numbers that are
    not from 1 to 2^20. As the first product does, it may measure.
    """

def product_times(layout: str, tokens: int, grouped: bool = False) -> dict[str, float]:
    """Seconds that a sample of products with so many tokens takes by each algorithm, now.

    A matrix of 1024 x 1024 in `layout`, one thread, the shortest of some turns; tokens are rounded
    down to the number that shares its choice. The first is what the instruction set usually takes.
    Empty where there is nothing to choose. Raises ValueError for another layout, or tokens
    that are not from 1 to 2^20.
    """

def build_info() -> dict[str, str | int]:
    """Compiler, torch and ABI floor of this build."""

def attention_pages() -> list[tuple[int, int]]:
    """Of each sequence of this thread's last step: pages that attention has read, of how many.

    Of all its tokens, layers and KV heads under policies; empty where no layer had one.
    """

def activation_zeros() -> tuple[int, int]:
    """Of this thread's last step: inputs whose columns were not read because they are 0, of all.

    Of products of one token in blocks with `sparsity`; (0, 0) where there were none.
    """

def region_count() -> int:
    """Parallel regions opened by ops since the library was loaded."""

def mark_forked() -> bool:
    """For the child of a fork: ops run on one thread from now on if the parent opened a region."""

def prepare_pages(data_ptr: int, nbytes: int) -> int:
    """Ask for huge pages behind fresh memory (a hint), and for the placement of BITNET_OPS_MEMORY.

    Returns the bytes in huge pages, 0 where there are none.
    """

def memory_placement() -> str:
    """What BITNET_OPS_MEMORY says, "first_touch" or "interleave"; RuntimeError where it errs."""

def check_amx(products: int, seed: int = 0) -> list[dict[str, object]]:
    """Random tile products by this CPU's AMX and by the model in plain C++, a row an instruction.

    Keys: instruction, available, outputs, different, first_difference. Asks the system for tiles.
    """

def probe_read(data_ptr: int, nbytes: int, streams: int = 1, distance: int = 0) -> int:
    """Read memory once: the bandwidth limit of benchmarks.

    Whole pages of 4096 bytes are read, by every thread as 1, 2 or 4 sequential streams, each
    prefetched by software `distance` bytes ahead (0: not at all). Which form is the fastest differs
    between CPUs. Returns a checksum that depends on every byte read, so that no compiler may leave
    one out. Threads are those of the ops, once `bitnet_ops.ops` is imported. Raises ValueError.
    """

def probe_int8_peak(iterations: int) -> int:
    """Run the int8 product of the unit that large products run on: the compute limit of benchmarks.

    The vector unit multiplies out of registers, a matrix unit (AMX) 2 x 2 tiles out of L1, on data
    that are no zeros. 0 iterations: an empty parallel region, what entering and leaving one costs.
    Returns the multiply-adds executed by all threads. Raises ValueError.
    """

def ping_pong_ns(
    cpu_a: int, cpu_b: int, batches: int = 25, round_trips: int = 100, timeout_s: float = 0.25
) -> list[float]:
    """Mean round trip of a cache line between two CPUs, in ns; one value a batch done in time.

    Empty when the two threads never ran at the same time (a busy machine). Benchmarks alone use it.
    """

class FormatError(ValueError):
    """A violation of FORMAT.md: `code` names the rule, `offset` is the byte it was found at."""

    code: str
    offset: int

class SglbitntTensor:
    """One tensor record; `scale` is None unless it is the tensor's only one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def in_features(self) -> int | None: ...
    @property
    def scale_kind(self) -> str: ...
    @property
    def scale_dtype(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def scales_offset(self) -> int: ...
    @property
    def scales_nbytes(self) -> int: ...
    @property
    def checksum(self) -> int: ...

class SglbitntFile(Buffer):
    """A memory-mapped SGLBITNT file, fully checked; its buffer is the whole file, read-only."""

    def __init__(self, path: str | bytes, check_codes: bool = True) -> None: ...
    @property
    def config_json(self) -> str: ...
    @property
    def tensors(self) -> list[SglbitntTensor]: ...
    @property
    def version(self) -> int: ...
    def check_length(self) -> None: ...
    def check_sum(self, index: int) -> None: ...
    def check_data(self, index: int) -> None: ...
    def release(self, index: int) -> None: ...
    def check_in_features(self, index: int, in_features: int) -> None: ...
    def code_counts(self, index: int) -> tuple[int, int, int]: ...

def xxh64(data: Buffer) -> int:
    """XXH64 with seed 0 of contiguous bytes."""

def gguf_strings(
    data: Buffer, offset: int, count: int, max_bytes: int, first: int, stride: int
) -> tuple[int, int, int, int, bytes]:
    """Walk strings of a GGUF array: count, end, fault, at, marks of csrc/format/gguf_strings.h."""

def format_error_codes() -> list[str]:
    """Every value that FormatError.code may take."""
