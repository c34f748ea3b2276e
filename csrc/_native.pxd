# Declares the C++ functions and classes that _native.pyx binds, as far as it calls them. Cython reads this file with it.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.vector cimport vector

ctypedef uintptr_t Address

cdef extern from "bindings.h" namespace "superoffload::bindings" nogil:
    ctypedef const void* ConstPointer "const void*"
    ctypedef void* Pointer "void*"
    void set_python_error()

cdef extern from "arm_adam/adam.h" namespace "superoffload::adam" nogil:
    const size_t kBlock
    const size_t kMaxAxes
    const size_t kMomentBlock
    cdef cppclass CElementType "superoffload::adam::ElementType":
        pass
    cdef cppclass CRun "superoffload::adam::Run":
        void* master
        void* exp_avg
        void* exp_avg_sq
        const void* gradient
        void* shadow
        uint64_t first_index
        uint32_t start
        cbool past_cache
        uint8_t* exp_avg_scales
        uint8_t* exp_avg_sq_scales
    cdef cppclass Hyper:
        double lr
        double beta1
        double beta2
        double eps
        double weight_decay
        uint64_t step
        double gradient_factor
        cbool l2
    cdef cppclass Scalars:
        pass
    Scalars c_freeze "superoffload::adam::freeze"(const Hyper&, uint64_t noise_stream)
    void c_pack "superoffload::adam::pack"(const void*, void*, CElementType, size_t, double*)
    double c_fold_sums "superoffload::adam::fold_sums"(const double*, size_t)
    const char* c_current_isa "superoffload::adam::current_isa"()
    cbool c_set_isa "superoffload::adam::set_isa"(const char*)

cdef extern from "runtime/huge_pages.h" namespace "superoffload" nogil:
    void c_prefer_huge_pages "superoffload::prefer_huge_pages"(void*, size_t)

cdef extern from "runtime/bit_sums.h" namespace "superoffload" nogil:
    cdef cppclass BitSums:
        pass

cdef extern from "runtime/journal_memory.h" namespace "superoffload" nogil:
    cdef cppclass CJournalMemory "superoffload::JournalMemory":
        CJournalMemory(uint64_t bytes, uint64_t kept) except +set_python_error
        uint64_t bytes()
        uint64_t held()
        int users()

cdef extern from "runtime/bucket_work.h" namespace "superoffload" nogil:
    const size_t kChunk
    cdef cppclass COperation "superoffload::Operation":
        pass
    cdef cppclass CJournalUse "superoffload::JournalUse":
        uint64_t bytes
        uint64_t escapes[3]
        uint64_t narrow_escapes
    cdef cppclass RunOfShard:
        CRun run
        uint64_t noise_stream
    cdef cppclass CBucketWork "superoffload::BucketWork":
        CBucketWork(vector[RunOfShard], shared_ptr[CJournalMemory]) except +set_python_error
        CBucketWork(vector[RunOfShard], uint64_t journal_bytes) except +set_python_error
        void set_gradients(const vector[ConstPointer]&) except +set_python_error
        void freeze(const Hyper&, const vector[uint64_t]&) except +set_python_error
        cbool take_journal(int width) except +set_python_error
        cbool take_halves() except +set_python_error
        cbool publishes()
        void release_journal()
        cbool run_all(COperation, int width) except +set_python_error
        size_t numel()
        cbool overflowed()
        CJournalUse journal_use()

cdef extern from "runtime/completion.h" namespace "superoffload" nogil:
    double c_now_seconds "superoffload::now_seconds"()
    cdef cppclass AtomicDouble "std::atomic<double>":
        double load()
    cdef cppclass CCompletion "superoffload::Completion":
        @staticmethod
        shared_ptr[CCompletion] already_done()
        cbool done()
        void finish()
        void fail(string)
        string error()
        AtomicDouble began
        AtomicDouble ended

cdef extern from "runtime/host_pieces.h" namespace "superoffload" nogil:
    cdef cppclass CHostPieces "superoffload::HostPieces":
        CHostPieces(CElementType)
        void add(void* packed, size_t numel, double* block_sums, const void* shadow, size_t shadow_bytes) except +set_python_error
        void pack(const vector[ConstPointer]&) except +set_python_error
        void publish(const vector[Pointer]&) except +set_python_error

cdef extern from "runtime/worker_pool.h" namespace "superoffload" nogil:
    cdef cppclass CWorkerPool "superoffload::WorkerPool":
        @staticmethod
        shared_ptr[CWorkerPool] create(const vector[int]& cpus) except +set_python_error
        shared_ptr[CCompletion] submit(shared_ptr[CBucketWork], COperation, int, shared_ptr[CCompletion]) except +set_python_error
        shared_ptr[CCompletion] run(shared_ptr[CBucketWork], COperation) except +set_python_error
        cbool withdraw(const shared_ptr[CCompletion]&) except +set_python_error
        void close() except +set_python_error
        size_t threads()
        double busy_seconds()
        void enter()
        void leave()
        void inject_fault(int, const string&)

cdef extern from "cuda/pipeline.h" namespace "superoffload::cuda" nogil:
    ctypedef unsigned long long DeviceAddress
    ctypedef void* Stream "superoffload::cuda::Stream"
    const uint64_t kSummedBytes
    size_t c_scratch_bytes "superoffload::cuda::scratch_bytes"(const vector[uint64_t]&)
    cdef cppclass Gpu:
        string pci_bus_id() except +set_python_error
    cdef cppclass Streams:
        Stream pack
        Stream down
        Stream up
    cdef cppclass Staging:
        DeviceAddress down
        uint64_t slot_bytes
        unsigned slots
        DeviceAddress up
    cdef cppclass PieceSpec:
        uint64_t offset
        uint64_t numel
        double* block_sums
    cdef cppclass BucketSpec:
        vector[PieceSpec] pieces
        CElementType gradient_type
        CElementType published_type
        void* packed
        void* shadow
        void* scratch
        DeviceAddress device_scratch
        DeviceAddress resident
        string step_kernel
    cdef cppclass CDeviceBucket "superoffload::cuda::DeviceBucket":
        pass
    cdef cppclass SummedRun:
        DeviceAddress memory
        uint64_t bytes
        DeviceAddress sums
    cdef cppclass CSumsTable "superoffload::cuda::SumsTable":
        @staticmethod
        size_t bytes(size_t runs)
        size_t capacity()
        cbool is_free() except +set_python_error
    cdef cppclass Pipeline:
        @staticmethod
        shared_ptr[Pipeline] create(shared_ptr[Gpu], const Streams&, void*, const string&, double) except +set_python_error
        cbool has_kernels()
        cbool uses_flag()
        uint64_t bytes_early()
        void set_staging(const Staging&) except +set_python_error
        shared_ptr[CDeviceBucket] make_bucket(const BucketSpec&) except +set_python_error
        shared_ptr[CCompletion] pack(
            const shared_ptr[CDeviceBucket]&, Stream, const vector[DeviceAddress]&, cbool, const vector[Stream]&,
            DeviceAddress, DeviceAddress) except +set_python_error
        void hold_back(const shared_ptr[CDeviceBucket]&, Stream) except +set_python_error
        void stage(const shared_ptr[CDeviceBucket]&, shared_ptr[CCompletion], const vector[cbool]&) except +set_python_error
        cbool unstage(const shared_ptr[CDeviceBucket]&) except +set_python_error
        void release(const shared_ptr[CDeviceBucket]&, Stream) except +set_python_error
        shared_ptr[CCompletion] deliver(
            const shared_ptr[CDeviceBucket]&, shared_ptr[CCompletion], Stream, const vector[DeviceAddress]&
        ) except +set_python_error
        void make_visible(const shared_ptr[CDeviceBucket]&, Stream) except +set_python_error
        string step(const shared_ptr[CDeviceBucket]&, Stream, string, unsigned, uint64_t, DeviceAddress) except +set_python_error
        cbool has_stepped(const shared_ptr[CDeviceBucket]&) except +set_python_error
        shared_ptr[CSumsTable] make_sums_table(void*, DeviceAddress, size_t) except +set_python_error
        void take_sums(CSumsTable&, Stream, const vector[SummedRun]&) except +set_python_error
        vector[cbool] compare_sums(CSumsTable&, Stream, const vector[SummedRun]&) except +set_python_error
        cbool drain(double timeout_seconds) except +set_python_error
        cbool close(cbool keep_kernels) except +set_python_error

cdef extern from "cuda/pinned.h" namespace "superoffload::cuda" nogil:
    cdef cppclass PinnedRequest:
        size_t bytes
        int node
        cbool strict
        unsigned threads
        size_t chunk
    cdef cppclass CPinnedMemory "superoffload::cuda::PinnedMemory":
        void* data()
        size_t bytes()
        size_t chunk()
        cbool pinned()
        const string& refusal()
        void unpin() except +set_python_error
        void leak()

# Defined last, since it names what is declared above.
cdef extern from "bindings.h" namespace "superoffload::bindings" nogil:
    void set_exceptions(object driver_error, object threads_refused)
    vector[T] pointers[T](const vector[Address]&)
    CElementType element_type(int) except +set_python_error
    COperation operation_of "superoffload::bindings::operation"(int) except +set_python_error
    RunOfShard make_run(
        int gradient_type, int shadow_type, int state_type, cbool split_master, cbool has_scales, size_t numel
    ) except +set_python_error
    void set_axes(CRun&, const vector[pair[uint64_t, uint32_t]]&) except +set_python_error
    vector[BitSums] sums_of(const vector[pair[Address, size_t]]&, unsigned threads) except +set_python_error
    vector[string] c_available_isas "superoffload::bindings::available_isas"()
    int wait_a_little(CCompletion&, double until)
    shared_ptr[Gpu] open_gpu(const string& library, int ordinal) except +set_python_error
    shared_ptr[CPinnedMemory] make_pinned(shared_ptr[Gpu], const PinnedRequest&) except +set_python_error
