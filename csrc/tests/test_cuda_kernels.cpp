// Tests the emulated kernels of csrc/cuda against those of csrc/arm_adam on the scalar set: the same bits for hostile
// and ordinary inputs, all types, all lengths around blocks, aligned and not, whatever the grid.
#include "cuda_shim.h"
//
#include <algorithm>
#include <cstddef>
#include <string>

#include "arm_adam/adam.h"
#include "battery_inputs.h"
#include "cuda/bit_sums.cuh"
#include "cuda/moment_codes.cuh"
#include "cuda/pieces.cuh"
#include "cuda/step.cuh"
#include "cuda/streams.h"
#include "guarded.h"
#include "harness.h"

extern "C" void emulate_launch(const char* name, unsigned grid, unsigned block, void** arguments);

namespace {

namespace adam = superoffload::adam;
namespace cuda = superoffload::cuda;
using adam::element_size;
using adam::ElementType;
using harness::Guarded;

static_assert(sizeof(cuda::Scalars) == sizeof(adam::Scalars), "the same struct");
static_assert(offsetof(cuda::Scalars, eps) == offsetof(adam::Scalars, eps), "the same struct");
static_assert(offsetof(cuda::Scalars, weight_decay) == offsetof(adam::Scalars, weight_decay), "the same struct");
static_assert(offsetof(cuda::Scalars, l2) == offsetof(adam::Scalars, l2), "the same struct");
static_assert(offsetof(cuda::Scalars, noise_key) == offsetof(adam::Scalars, noise_key), "the same struct");
static_assert(cuda::kMaxAxes == adam::kMaxAxes, "the same axes");
static_assert(cuda::kBlock == adam::kBlock && cuda::kMomentBlock == adam::kMomentBlock, "the same blocks");

const char* const kTypes[] = {"f32", "bf16", "f16", "q8"};

static_assert(offsetof(cuda::Table<cuda::CopyPiece>, pieces) == offsetof(cuda::TableArgument, pieces), "one struct");
static_assert(sizeof(cuda::TableArgument::pieces) == cuda::kTableBytes, "one struct");

// Passes pieces as an argument and in memory by turns, as far as there is a choice.
template <typename Piece, typename... Arguments>
void launch(const std::string& name, unsigned grid, const Piece* pieces, unsigned count, Arguments... arguments) {
    static bool in_memory = false;
    in_memory = !in_memory;
    cuda::Table<Piece> table{};
    if (in_memory || count * sizeof(Piece) > sizeof table.pieces) {
        table.longer = pieces;
    } else {
        std::copy(pieces, pieces + count, table.pieces);
    }
    void* addresses[] = {&table, &count, &arguments...};
    emulate_launch(name.c_str(), grid, cuda::kThreads, addresses);
}

unsigned blocks_of(std::size_t numel) { return static_cast<unsigned>((numel + adam::kBlock - 1) / adam::kBlock); }

// Holds the state and gradient of a battery's case, all of them aligned or each shifted in its own way.
struct Memory {
    Guarded master, upper, exp_avg, exp_avg_sq, gradient, shadow;  // the shadow: what is published
    Guarded exp_avg_scales, exp_avg_sq_scales;                     // of 8-bit moments; others have none

    Memory(const battery::Case& c, bool aligned)
        : master((c.split ? 2 : 4) * c.numel, aligned ? 0 : (c.split ? 2 : 4) * c.offset),
          upper(2 * c.numel, aligned ? 0 : 2 * (c.offset + 5)),
          exp_avg(element_size(c.state) * c.numel, aligned ? 0 : element_size(c.state) * (c.offset + 3)),
          exp_avg_sq(element_size(c.state) * c.numel, aligned ? 0 : element_size(c.state) * (c.offset + 6)),
          gradient(element_size(c.gradient) * c.numel, aligned ? 0 : element_size(c.gradient) * c.offset),
          shadow(element_size(c.shadow) * c.numel, aligned ? 0 : element_size(c.shadow) * (c.offset + 1)),
          exp_avg_scales(battery::scales_of(c), c.offset),
          exp_avg_sq_scales(battery::scales_of(c), c.offset + 3) {
        std::vector<std::uint8_t> whole(4 * c.numel);
        battery::fill(c, c.split ? whole.data() : master.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data());
        if (c.split) battery::split(whole.data(), c.numel, upper.as<std::uint16_t>(), master.as<std::int16_t>());
        std::memset(shadow.data(), 0, shadow.size());
        battery::fill_scales(c, exp_avg_scales.data(), exp_avg_sq_scales.data());
    }

    // Steps on this processor, where the shadow is the upper half of a split master.
    void step_here(const battery::Case& c) {
        adam::Run run{master.data(),
                      exp_avg.data(),
                      exp_avg_sq.data(),
                      gradient.data(),
                      c.split ? upper.data() : shadow.data(),
                      {nullptr, nullptr, nullptr, 1},
                      c.numel,
                      c.gradient,
                      c.shadow,
                      freeze(c.hyper, c.number),
                      c.state};
        run.split_master = c.split;
        battery::place(run, c.number);
        run.exp_avg_scales = exp_avg_scales.data();
        run.exp_avg_sq_scales = exp_avg_sq_scales.data();
        adam::step(run, {0, c.numel});
        if (c.split && c.numel != 0) std::memcpy(shadow.data(), upper.data(), shadow.size());
    }

    cuda::StepPiece piece(const battery::Case& c, std::uint64_t first_block) {
        const adam::Scalars frozen = freeze(c.hyper, c.number);
        cuda::StepPiece piece{master.data(),
                              upper.as<unsigned short>(),
                              exp_avg.data(),
                              exp_avg_sq.data(),
                              exp_avg_scales.data(),
                              exp_avg_sq_scales.data(),
                              gradient.data(),
                              shadow.data(),
                              c.numel,
                              first_block,
                              0,
                              {},
                              {},
                              0,
                              0,
                              {}};
        adam::Run placed{};
        battery::place(placed, c.number);
        piece.first_index = placed.first_index;
        piece.start = placed.start;
        piece.axis_count = placed.axis_count;
        for (unsigned k = 0; k < placed.axis_count; ++k) {
            piece.axis_lengths[k] = placed.axes[k].length;
            piece.axis_strides[k] = placed.axes[k].stride;
        }
        std::memcpy(&piece.scalars, &frozen, sizeof frozen);
        return piece;
    }

    bool equals(Memory& other) {
        return master.bytes() == other.master.bytes() && upper.bytes() == other.upper.bytes() &&
               exp_avg.bytes() == other.exp_avg.bytes() && exp_avg_sq.bytes() == other.exp_avg_sq.bytes() &&
               shadow.bytes() == other.shadow.bytes() && gradient.bytes() == other.gradient.bytes() &&
               exp_avg_scales.bytes() == other.exp_avg_scales.bytes() &&
               exp_avg_sq_scales.bytes() == other.exp_avg_sq_scales.bytes();
    }
    bool intact() {
        return master.intact() && upper.intact() && exp_avg.intact() && exp_avg_sq.intact() && gradient.intact() &&
               shadow.intact() && exp_avg_scales.intact() && exp_avg_sq_scales.intact();
    }
};

std::string text_of(const battery::Case& c, bool aligned) {
    return "case " + std::to_string(c.number) + " numel " + std::to_string(c.numel) + " gradient " +
           kTypes[static_cast<int>(c.gradient)] + " shadow " + kTypes[static_cast<int>(c.shadow)] + " state " +
           kTypes[static_cast<int>(c.state)] + (aligned ? " aligned" : " shifted");
}

bool has_step_kernel(const battery::Case& c) { return c.gradient == ElementType::f32 || c.gradient == c.shadow; }

std::string step_kernel(const battery::Case& c) {
    const std::string types = std::string(kTypes[static_cast<int>(c.gradient)]) + "_" +
                              (c.split ? "split" : kTypes[static_cast<int>(c.shadow)]);
    return "step_" + types + (c.state == ElementType::bf16 ? "_noisy" : c.state == ElementType::q8 ? "_q8" : "");
}

// Steps a case here and by the emulated kernel, at aligned addresses or others. False: they differ.
bool steps_equal(const battery::Case& c, bool aligned) {
    Memory expected(c, aligned);
    Memory got(c, aligned);
    expected.step_here(c);
    const cuda::StepPiece piece = got.piece(c, 0);
    const cuda::StepPiece* pieces = &piece;
    {
        const battery::CallerEnvironment environment(c.environment);
        launch(step_kernel(c), blocks_of(c.numel) + 1, pieces, 1u);
    }
    return EXPECT_FOR(got.equals(expected), text_of(c, aligned)) && EXPECT_FOR(got.intact(), text_of(c, aligned));
}

TEST(step_has_the_bits_of_the_scalar_kernel) {
    adam::set_isa("scalar");
    unsigned tried = 0;
    unsigned split = 0;
    unsigned quantized = 0;
    for (const battery::Case& c : battery::cases(false)) {
        if (!has_step_kernel(c)) continue;
        for (const bool aligned : {false, true}) {
            ++tried;
            split += c.split ? 1 : 0;
            quantized += c.state == ElementType::q8 ? 1 : 0;
            if (!steps_equal(c, aligned)) return;
        }
    }
    EXPECT(tried > 1000 && split > 300 && quantized > 300);
}

// Launches many pieces at once, empty ones among them, on grids smaller and larger than their blocks.
TEST(step_finds_its_pieces) {
    adam::set_isa("scalar");
    for (const unsigned grid : {1u, 7u, 400u}) {
        std::vector<std::unique_ptr<Memory>> expected;
        std::vector<std::unique_ptr<Memory>> got;
        std::vector<cuda::StepPiece> pieces;
        std::uint64_t first_block = 0;
        for (const battery::Case& c : battery::cases(false)) {
            if (!has_step_kernel(c) || step_kernel(c) != "step_bf16_bf16") continue;
            expected.push_back(std::make_unique<Memory>(c, c.number % 2 == 0));
            got.push_back(std::make_unique<Memory>(c, c.number % 2 == 0));
            expected.back()->step_here(c);
            pieces.push_back(got.back()->piece(c, first_block));
            first_block += blocks_of(c.numel);
        }
        const cuda::StepPiece* first = pieces.data();
        launch("step_bf16_bf16", grid, first, static_cast<unsigned>(pieces.size()));
        EXPECT(first_block > 10);
        for (std::size_t i = 0; i < got.size(); ++i) {
            if (!EXPECT_FOR(got[i]->equals(*expected[i]), "piece " + std::to_string(i))) return;
        }
    }
}

// Holds pieces of several lengths, shifts and contents in one buffer of packed gradients or staged parameters.
struct Pieces {
    std::vector<std::unique_ptr<Guarded>> tensors;
    std::vector<std::size_t> numels, offsets;
    std::vector<cuda::CopyPiece> pieces;
    std::size_t padded = 0;
    unsigned blocks = 0;

    Pieces(ElementType type, bool hostile) {
        std::size_t number = 0;
        for (const std::size_t numel : {1024, 0, 1, 15, 16, 17, 1023, 5000, 2048, 1025, 3072, 777, 4096, 64}) {
            const std::size_t size = element_size(type);
            tensors.push_back(std::make_unique<Guarded>(size * numel, number % 3 == 0 ? 0 : size * number));
            for (std::size_t i = 0; i < numel; ++i) {
                const std::uint64_t bits = battery::mix(number << 32 | i);
                const bool special = hostile && number % 4 != 1;
                // 16-bit formats take the upper half, which is valid for each of them
                const std::uint32_t word =
                    special ? battery::hostile_word(bits) : battery::plain_word(bits, 0u - 9, 12);
                if (size == 4) std::memcpy(tensors.back()->data() + 4 * i, &word, 4);
                const auto half = static_cast<std::uint16_t>(special ? word : word >> 16);
                if (size == 2) std::memcpy(tensors.back()->data() + 2 * i, &half, 2);
            }
            numels.push_back(numel);
            offsets.push_back(padded);
            pieces.push_back({tensors.back()->data(), padded, numel, blocks});
            padded += number % 5 == 4 ? numel + 3 : (numel + 63) / 64 * 64;  // some shifted in the buffer too
            blocks += blocks_of(numel);
            ++number;
        }
    }
};

void check_pack(ElementType type, bool hostile, unsigned grid) {
    Pieces p(type, hostile);
    const std::size_t size = element_size(type);
    Guarded packed(size * p.padded);
    Guarded expected(size * p.padded);
    Guarded sums(8 * p.blocks);
    std::vector<double> expected_sums(p.blocks);
    for (std::size_t k = 0; k < p.pieces.size(); ++k) {
        adam::sum_of_squares(p.tensors[k]->data(), type, p.numels[k], expected_sums.data() + p.pieces[k].first_block);
        std::memcpy(expected.data() + size * p.offsets[k], p.tensors[k]->data(), size * p.numels[k]);
    }
    const cuda::CopyPiece* pieces = p.pieces.data();
    void* target = packed.data();
    const std::string name = std::string("pack_") + kTypes[static_cast<int>(type)];
    // Runs with the sums of bits (one per 512 words of 32 bits) and without, as where gradients are freed.
    const std::size_t parts = size / 2;
    Guarded bits(8 * parts * p.blocks);
    auto* const wanted = hostile ? bits.as<cuda::Sum>() : nullptr;
    launch(name, grid, pieces, static_cast<unsigned>(p.pieces.size()), target, sums.as<double>(), wanted);
    const std::string where = name + " grid " + std::to_string(grid);
    EXPECT_FOR(packed.bytes() == expected.bytes(), where);
    EXPECT_FOR(std::memcmp(sums.data(), expected_sums.data(), 8 * p.blocks) == 0, where);
    EXPECT_FOR(packed.intact() && sums.intact(), where);
    EXPECT_FOR(bits.intact(), where);
    for (std::size_t k = 0; k < p.pieces.size() && hostile; ++k) {
        if (p.numels[k] == 0) continue;  // it has no sums
        const std::size_t count = (size * p.numels[k] + 2047) / 2048;
        std::vector<cuda::Sum> expected_bits(count);
        const cuda::SumPiece piece{p.tensors[k]->as<unsigned short>(), expected_bits.data(), parts * p.numels[k], 0};
        launch("sum_bits", grid, &piece, 1u);
        const cuda::Sum* const found = bits.as<cuda::Sum>() + parts * p.pieces[k].first_block;
        EXPECT_FOR(std::memcmp(found, expected_bits.data(), 8 * count) == 0, where + " piece " + std::to_string(k));
    }
    bool infinite = false;
    for (const double sum : expected_sums) infinite = infinite || sum == __builtin_inf();
    EXPECT_FOR(infinite == hostile, where);
}

TEST(pack_has_the_bits_of_the_scalar_kernel) {
    adam::set_isa("scalar");
    for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
        for (const bool hostile : {false, true}) {
            for (const unsigned grid : {1u, 3u, 40u}) check_pack(type, hostile, grid);
        }
    }
}

TEST(pack_of_nothing_does_nothing) {
    const cuda::CopyPiece empty{nullptr, 0, 0, 0};
    const cuda::CopyPiece* pieces = &empty;
    void* packed = nullptr;
    double* sums = nullptr;
    std::uint64_t* bit_sums = nullptr;
    for (const unsigned count : {0u, 1u}) launch("pack_bf16", 2, pieces, count, packed, sums, bit_sums);
}

TEST(unpack_keeps_every_bit) {
    for (const ElementType type : {ElementType::f32, ElementType::bf16}) {
        Pieces p(type, true);
        const std::size_t size = element_size(type);
        Guarded staged(size * p.padded);
        for (std::size_t i = 0; i < p.padded; ++i) {
            const std::uint32_t word = battery::hostile_word(battery::mix(i));
            std::memcpy(staged.data() + size * i, &word, size);
        }
        const cuda::CopyPiece* pieces = p.pieces.data();
        const void* source = staged.data();
        const std::string name = "unpack_" + std::to_string(8 * size);
        launch(name, 3, pieces, static_cast<unsigned>(p.pieces.size()), source);
        for (std::size_t k = 0; k < p.pieces.size(); ++k) {
            const bool same =
                std::memcmp(p.tensors[k]->data(), staged.data() + size * p.offsets[k], size * p.numels[k]) == 0;
            EXPECT_FOR(same && p.tensors[k]->intact(), name + " piece " + std::to_string(k));
        }
    }
}

}  // namespace

int main(int argc, char** argv) { return harness::run_all(argc > 1 ? argv[1] : nullptr); }
