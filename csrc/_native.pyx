# Binds the C++ sources to Python: superoffload._native, whose types are in superoffload/_native.pyi. The C++
# side is declared in _native.pxd.
#
# cython: language_level=3, binding=False, emit_code_comments=False
# cython: c_string_type=unicode, c_string_encoding=utf8
"""superoffload's C++ extension; use superoffload.kernels and superoffload.AdamW."""

# Raw addresses go in, no torch and no NumPy types. Cython compiles this for Python's limited API (PEP 384), so that one
# file serves every Python from 3.10 on.

from enum import IntEnum

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.vector cimport vector

from superoffload.errors import SuperOffloadError


class DriverError(RuntimeError):
    """A call of the GPU's driver failed; the text names the call, the error and what to do."""

    __module__ = "superoffload._native"


# ---- kernels ---------------------------------------------------------------------------------------------------------

BLOCK = kBlock
MAX_AXES = kMaxAxes
MOMENT_BLOCK = kMomentBlock
CHUNK = kChunk
SUMMED_BYTES = kSummedBytes


class ElementType(IntEnum):
    f32 = 0
    bf16 = 1
    f16 = 2
    q8 = 3


class Operation(IntEnum):
    step = 0
    step_journaled = 1
    undo = 2
    replay = 3
    publish = 4
    settle = 5


cdef class Run:
    cdef RunOfShard value

    def __init__(
        self, Address master, Address exp_avg, Address exp_avg_sq, Address gradient, Address shadow, size_t numel,
        int gradient_type, int shadow_type, int state_type=0, uint64_t first_index=0, uint32_t start=0, axes=(),
        uint64_t noise_stream=0, cbool past_cache=False, cbool split_master=False, Address exp_avg_scales=0,
        Address exp_avg_sq_scales=0,
    ):
        cdef cbool has_scales = exp_avg_scales != 0 and exp_avg_sq_scales != 0
        self.value = make_run(gradient_type, shadow_type, state_type, split_master, has_scales, numel)
        cdef CRun* run = &self.value.run
        run.master = <void*>master
        run.exp_avg = <void*>exp_avg
        run.exp_avg_sq = <void*>exp_avg_sq
        run.gradient = <const void*>gradient
        run.shadow = <void*>shadow
        run.first_index = first_index
        run.start = start
        set_axes(self.value.run, axes)
        run.past_cache = past_cache
        run.exp_avg_scales = <uint8_t*>exp_avg_scales
        run.exp_avg_sq_scales = <uint8_t*>exp_avg_sq_scales
        self.value.noise_stream = noise_stream


def prefer_huge_pages(Address array, size_t bytes):
    c_prefer_huge_pages(<void*>array, bytes)


def available_isas():
    return c_available_isas()


def current_isa():
    return c_current_isa()


def set_isa(string name):
    return c_set_isa(name.c_str())


def pack(Address gradient, Address packed, int type, size_t numel, Address block_sums):
    cdef CElementType element = element_type(type)
    with nogil:
        c_pack(<const void*>gradient, <void*>packed, element, numel, <double*>block_sums)


def bit_sums(vector[pair[Address, size_t]] runs, unsigned threads):
    cdef vector[BitSums] sums
    with nogil:
        sums = sums_of(runs, threads)
    return [PyBytes_FromStringAndSize(<const char*>&sums[i], sizeof(BitSums)) for i in range(sums.size())]


cdef Hyper hyper_of(
    double lr, double beta1, double beta2, double eps, double weight_decay, uint64_t step, double gradient_factor, cbool l2
):
    cdef Hyper hyper
    hyper.lr = lr
    hyper.beta1 = beta1
    hyper.beta2 = beta2
    hyper.eps = eps
    hyper.weight_decay = weight_decay
    hyper.step = step
    hyper.gradient_factor = gradient_factor
    hyper.l2 = l2
    return hyper


def freeze_scalars(
    double lr, double beta1, double beta2, double eps, double weight_decay, double gradient_factor, cbool l2,
    uint64_t step, uint64_t noise_stream=0,
):
    # As bytes, for kernels that are launched elsewhere.
    cdef Scalars frozen = c_freeze(hyper_of(lr, beta1, beta2, eps, weight_decay, step, gradient_factor, l2), noise_stream)
    return PyBytes_FromStringAndSize(<const char*>&frozen, sizeof(Scalars))


def fold_sums(vector[pair[Address, size_t]] sums):
    # Each shard's sums separately, so that each keeps its fixed order.
    return [c_fold_sums(<const double*>sums[i].first, sums[i].second) for i in range(sums.size())]


cdef class HostPieces:
    cdef shared_ptr[CHostPieces] held

    def __init__(self, int gradient_type):
        self.held = make_shared[CHostPieces](element_type(gradient_type))

    def add(self, Address packed, size_t numel, Address block_sums, Address shadow, size_t shadow_bytes):
        self.held.get().add(<void*>packed, numel, <double*>block_sums, <const void*>shadow, shadow_bytes)

    def pack(self, vector[Address] gradients):
        with nogil:
            self.held.get().pack(pointers[ConstPointer](gradients))

    def publish(self, vector[Address] parameters):
        with nogil:
            self.held.get().publish(pointers[Pointer](parameters))


# ---- worker threads --------------------------------------------------------------------------------------------------

cdef class JournalUse:
    cdef CJournalUse value

    @property
    def bytes(self):
        return self.value.bytes

    @property
    def escapes(self):
        return (self.value.escapes[0], self.value.escapes[1], self.value.escapes[2])

    @property
    def narrow_escapes(self):
        return self.value.narrow_escapes


cdef class JournalMemory:
    cdef shared_ptr[CJournalMemory] held_memory

    def __init__(self, uint64_t bytes, uint64_t kept):
        self.held_memory.reset(new CJournalMemory(bytes, kept))

    @property
    def bytes(self):
        return self.held_memory.get().bytes()

    @property
    def held(self):
        return self.held_memory.get().held()

    @property
    def users(self):
        return self.held_memory.get().users()


cdef class BucketWork:
    cdef shared_ptr[CBucketWork] held

    def __init__(self, list runs, journal):
        cdef vector[RunOfShard] values
        for run in runs:
            values.push_back((<Run?>run).value)
        if journal is None:
            self.held.reset(new CBucketWork(values, shared_ptr[CJournalMemory]()))
        elif isinstance(journal, JournalMemory):
            self.held.reset(new CBucketWork(values, (<JournalMemory>journal).held_memory))
        else:
            self.held.reset(new CBucketWork(values, <uint64_t>journal))

    def set_gradients(self, vector[Address] gradients):
        self.held.get().set_gradients(pointers[ConstPointer](gradients))

    def freeze(
        self, double lr, double beta1, double beta2, double eps, double weight_decay, double gradient_factor, cbool l2,
        vector[uint64_t] steps,
    ):
        self.held.get().freeze(hyper_of(lr, beta1, beta2, eps, weight_decay, 0, gradient_factor, l2), steps)

    def run_all(self, int operation, int width=1):
        cdef COperation chosen = operation_of(operation)
        cdef cbool done
        with nogil:
            done = self.held.get().run_all(chosen, width)
        return done

    def take_journal(self, int width):
        return self.held.get().take_journal(width)

    def take_halves(self):
        return self.held.get().take_halves()

    def release_journal(self):
        self.held.get().release_journal()

    def journal_use(self):
        cdef JournalUse use = JournalUse.__new__(JournalUse)
        use.value = self.held.get().journal_use()
        return use

    @property
    def publishes(self):
        return self.held.get().publishes()

    @property
    def overflowed(self):
        return self.held.get().overflowed()

    @property
    def numel(self):
        return self.held.get().numel()


cdef Completion completion_of(shared_ptr[CCompletion] held):
    cdef Completion completion = Completion.__new__(Completion)
    completion.held = held
    return completion


cdef shared_ptr[CCompletion] held_by(Completion completion):
    return shared_ptr[CCompletion]() if completion is None else completion.held


cdef class Completion:
    cdef shared_ptr[CCompletion] held

    def __cinit__(self):
        self.held = make_shared[CCompletion]()

    @staticmethod
    def already_done():
        return completion_of(CCompletion.already_done())

    def done(self):
        return self.held.get().done()

    def wait(self, double timeout_seconds=-1.0):
        # True once done, False when the time is up; a failure becomes a RuntimeError. Wakes up for signals (Ctrl-C).
        cdef double until = -1 if timeout_seconds < 0 else c_now_seconds() + timeout_seconds
        cdef int done = -1
        while done < 0:
            with nogil:
                done = wait_a_little(self.held.get()[0], until)
            if done != 1:
                PyErr_CheckSignals()
        if not done:
            return False
        cdef str error = self.held.get().error()
        if error:
            raise RuntimeError(error)
        return True

    def finish(self):
        self.held.get().finish()

    def fail(self, string error):
        self.held.get().fail(error)

    @property
    def error(self):
        return self.held.get().error()

    @property
    def began(self):
        return self.held.get().began.load()

    @property
    def ended(self):
        return self.held.get().ended.load()


cdef class WorkerPool:
    cdef shared_ptr[CWorkerPool] held
    cdef object __weakref__  # CPUAdamW's optimizers share pools for as long as one of them lives

    def __init__(self, vector[int] cpus):
        self.held = CWorkerPool.create(cpus)

    def submit(self, BucketWork work not None, int operation, int width=1, Completion after=None):
        cdef COperation chosen = operation_of(operation)
        cdef shared_ptr[CCompletion] waited = held_by(after)
        cdef shared_ptr[CCompletion] done
        with nogil:
            done = self.held.get().submit(work.held, chosen, width, waited)
        return completion_of(done)

    def run(self, BucketWork work not None, int operation):
        cdef COperation chosen = operation_of(operation)
        cdef shared_ptr[CCompletion] done
        with nogil:
            done = self.held.get().run(work.held, chosen)
        return completion_of(done)

    def withdraw(self, Completion done not None):
        cdef cbool withdrawn
        with nogil:
            withdrawn = self.held.get().withdraw(done.held)
        return withdrawn

    def close(self):
        with nogil:
            self.held.get().close()

    def enter(self):
        self.held.get().enter()

    def leave(self):
        self.held.get().leave()

    def inject_fault(self, int chunks_until, string message):
        self.held.get().inject_fault(chunks_until, message)

    @property
    def busy_seconds(self):
        return self.held.get().busy_seconds()

    @property
    def threads(self):
        return self.held.get().threads()


def now_seconds():
    return c_now_seconds()


# ---- the CUDA link: addresses and handles of streams go in -----------------------------------------------------------

def cuda_scratch_bytes(vector[uint64_t] numels):
    return c_scratch_bytes(numels)


cdef class CudaGpu:
    cdef shared_ptr[Gpu] held

    def __init__(self, string library, int ordinal):
        with nogil:
            self.held = open_gpu(library, ordinal)

    @property
    def pci_bus_id(self):
        return self.held.get().pci_bus_id()


cdef class PinnedMemory:
    cdef shared_ptr[CPinnedMemory] held

    def __init__(self, CudaGpu gpu not None, size_t bytes, int node, cbool strict, unsigned threads, size_t chunk):
        cdef PinnedRequest request
        request.bytes = bytes
        request.node = node
        request.strict = strict
        request.threads = threads
        request.chunk = chunk
        with nogil:
            self.held = make_pinned(gpu.held, request)

    def unpin(self):
        with nogil:
            self.held.get().unpin()

    def leak(self):
        self.held.get().leak()

    @property
    def __array_interface__(self):  # the limited API of Python 3.10 has no buffers
        data = (<Address>self.held.get().data(), False)
        return {"version": 3, "typestr": "|u1", "shape": (self.held.get().bytes(),), "data": data}

    @property
    def chunk(self):
        return self.held.get().chunk()

    @property
    def pinned(self):
        return self.held.get().pinned()

    @property
    def refusal(self):
        return self.held.get().refusal()


cdef class DeviceBucket:
    cdef shared_ptr[CDeviceBucket] held


cdef class CudaSumsTable:
    cdef shared_ptr[CSumsTable] held

    @staticmethod
    def bytes(size_t runs):
        return CSumsTable.bytes(runs)

    @property
    def capacity(self):
        return self.held.get().capacity()

    def is_free(self):
        cdef cbool free
        with nogil:
            free = self.held.get().is_free()
        return free


cdef vector[SummedRun] summed(list runs):
    cdef vector[SummedRun] found
    cdef SummedRun one
    for one.memory, one.bytes, one.sums in runs:
        found.push_back(one)
    return found


cdef class CudaPipeline:
    cdef shared_ptr[Pipeline] held

    def __init__(
        self, CudaGpu gpu not None, Address pack, Address down, Address up, Address flag, string image,
        double timeout_seconds,
    ):
        cdef Streams streams
        streams.pack = <Stream>pack
        streams.down = <Stream>down
        streams.up = <Stream>up
        with nogil:
            self.held = Pipeline.create(gpu.held, streams, <void*>flag, image, timeout_seconds)

    @property
    def has_kernels(self):
        return self.held.get().has_kernels()

    @property
    def uses_flag(self):
        return self.held.get().uses_flag()

    @property
    def bytes_early(self):
        return self.held.get().bytes_early()

    def set_staging(self, DeviceAddress down, uint64_t slot_bytes, unsigned slots, DeviceAddress up):
        cdef Staging staging
        staging.down = down
        staging.slot_bytes = slot_bytes
        staging.slots = slots
        staging.up = up
        with nogil:
            self.held.get().set_staging(staging)

    def make_bucket(
        self, list pieces, int gradient_type, int published_type, Address packed, Address shadow, Address scratch,
        DeviceAddress device_scratch, DeviceAddress resident=0, string step_kernel=b"",
    ):
        cdef BucketSpec spec
        cdef PieceSpec piece
        for offset, numel, block_sums in pieces:
            piece.offset = offset
            piece.numel = numel
            piece.block_sums = <double*><Address>block_sums
            spec.pieces.push_back(piece)
        spec.gradient_type = element_type(gradient_type)
        spec.published_type = element_type(published_type)
        spec.packed = <void*>packed
        spec.shadow = <void*>shadow
        spec.scratch = <void*>scratch
        spec.device_scratch = device_scratch
        spec.resident = resident
        spec.step_kernel = step_kernel
        cdef DeviceBucket bucket = DeviceBucket.__new__(DeviceBucket)
        with nogil:
            bucket.held = self.held.get().make_bucket(spec)
        return bucket

    def pack(
        self, DeviceBucket bucket not None, Address current, vector[DeviceAddress] addresses, cbool keep,
        vector[Address] others, DeviceAddress block, DeviceAddress bit_sums=0,
    ):
        cdef shared_ptr[CCompletion] done
        with nogil:
            done = self.held.get().pack(
                bucket.held, <Stream>current, addresses, keep, pointers[Stream](others), block, bit_sums
            )
        return completion_of(done)

    def hold_back(self, DeviceBucket bucket not None, Address stream):
        with nogil:
            self.held.get().hold_back(bucket.held, <Stream>stream)

    def stage(self, DeviceBucket bucket not None, Completion after, vector[cbool] present):
        cdef shared_ptr[CCompletion] waited = held_by(after)
        with nogil:
            self.held.get().stage(bucket.held, waited, present)

    def unstage(self, DeviceBucket bucket not None):
        cdef cbool copied
        with nogil:
            copied = self.held.get().unstage(bucket.held)
        return copied

    def release(self, DeviceBucket bucket not None, Address stream):
        with nogil:
            self.held.get().release(bucket.held, <Stream>stream)

    def deliver(
        self, DeviceBucket bucket not None, Completion after, Address current, vector[DeviceAddress] addresses
    ):
        cdef shared_ptr[CCompletion] waited = held_by(after)
        cdef shared_ptr[CCompletion] done
        with nogil:
            done = self.held.get().deliver(bucket.held, waited, <Stream>current, addresses)
        return completion_of(done)

    def make_visible(self, DeviceBucket bucket not None, Address current):
        with nogil:
            self.held.get().make_visible(bucket.held, <Stream>current)

    def step(
        self, DeviceBucket bucket not None, Address current, string table, unsigned count, uint64_t blocks,
        DeviceAddress device_table,
    ):
        cdef string error
        with nogil:
            error = self.held.get().step(bucket.held, <Stream>current, table, count, blocks, device_table)
        return error

    def has_stepped(self, DeviceBucket bucket not None):
        cdef cbool over
        with nogil:
            over = self.held.get().has_stepped(bucket.held)
        return over

    def make_sums_table(self, Address host, DeviceAddress device, size_t runs):
        cdef CudaSumsTable table = CudaSumsTable.__new__(CudaSumsTable)
        with nogil:
            table.held = self.held.get().make_sums_table(<void*>host, device, runs)
        return table

    def take_sums(self, CudaSumsTable table not None, Address current, list runs):
        cdef vector[SummedRun] read = summed(runs)
        with nogil:
            self.held.get().take_sums(table.held.get()[0], <Stream>current, read)

    def compare_sums(self, CudaSumsTable table not None, Address current, list runs):
        cdef vector[SummedRun] read = summed(runs)
        cdef vector[cbool] changed
        with nogil:
            changed = self.held.get().compare_sums(table.held.get()[0], <Stream>current, read)
        return changed

    def drain(self, double timeout_seconds):
        cdef cbool idle
        with nogil:
            idle = self.held.get().drain(timeout_seconds)
        return idle

    def close(self, *, cbool keep_kernels=False):
        cdef cbool closed
        with nogil:
            closed = self.held.get().close(keep_kernels)
        return closed


set_exceptions(DriverError, SuperOffloadError)
