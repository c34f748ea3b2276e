// The kernels of csrc/cuda, emulated, against those of csrc/arm_adam on the scalar set: the same bits for hostile and
// ordinary inputs, all types, all lengths around blocks, aligned and not, whatever the grid.
#include "cuda_shim.h"
//
#include <cstddef>
#include <string>

#include "arm_adam/adam.h"
#include "arm_adam/lanes_scalar.h"
#include "battery_inputs.h"
#include "cuda/pieces.cuh"
#include "cuda/step.cuh"
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
static_assert(cuda::kBlock == adam::kBlock, "the same blocks");

const char* const kTypes[] = {"f32", "bf16", "f16"};

std::string name_of(const char* operation, ElementType from, ElementType to) {
    return std::string(operation) + "_" + kTypes[static_cast<int>(from)] + "_" + kTypes[static_cast<int>(to)];
}

template <typename... Arguments>
void launch(const std::string& name, unsigned grid, Arguments... arguments) {
    void* addresses[] = {&arguments...};
    emulate_launch(name.c_str(), grid, cuda::kThreads, addresses);
}

unsigned blocks_of(std::size_t numel) { return static_cast<unsigned>((numel + adam::kBlock - 1) / adam::kBlock); }

// State and gradient of a battery's case, all of them aligned or each shifted in its own way.
struct Memory {
    Guarded master, exp_avg, exp_avg_sq, gradient, shadow;

    Memory(const battery::Case& c, bool aligned)
        : master(4 * c.numel, aligned ? 0 : 4 * c.offset),
          exp_avg(element_size(c.state) * c.numel, aligned ? 0 : element_size(c.state) * (c.offset + 3)),
          exp_avg_sq(element_size(c.state) * c.numel, aligned ? 0 : element_size(c.state) * (c.offset + 6)),
          gradient(element_size(c.gradient) * c.numel, aligned ? 0 : element_size(c.gradient) * c.offset),
          shadow(element_size(c.shadow) * c.numel, aligned ? 0 : element_size(c.shadow) * (c.offset + 1)) {
        battery::fill(c, master.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data());
        std::memset(shadow.data(), 0, shadow.size());
    }

    void step_here(const battery::Case& c) {
        const adam::Run run{master.as<float>(),
                            exp_avg.data(),
                            exp_avg_sq.data(),
                            gradient.data(),
                            shadow.data(),
                            {nullptr, nullptr, nullptr, 1},
                            c.numel,
                            c.gradient,
                            c.shadow,
                            freeze(c.hyper, c.number),
                            c.state,
                            battery::mix(c.number)};
        adam::step(run, {0, c.numel});
    }

    cuda::StepPiece piece(const battery::Case& c, std::uint64_t first_block) {
        const adam::Scalars frozen = freeze(c.hyper, c.number);
        cuda::StepPiece piece{master.as<unsigned>(),
                              exp_avg.data(),
                              exp_avg_sq.data(),
                              gradient.data(),
                              shadow.data(),
                              c.numel,
                              first_block,
                              0,
                              {}};
        piece.first_index = static_cast<unsigned>(battery::mix(c.number));
        std::memcpy(&piece.scalars, &frozen, sizeof frozen);
        return piece;
    }

    bool equals(Memory& other) {
        return master.bytes() == other.master.bytes() && exp_avg.bytes() == other.exp_avg.bytes() &&
               exp_avg_sq.bytes() == other.exp_avg_sq.bytes() && shadow.bytes() == other.shadow.bytes() &&
               gradient.bytes() == other.gradient.bytes();
    }
    bool intact() {
        return master.intact() && exp_avg.intact() && exp_avg_sq.intact() && gradient.intact() && shadow.intact();
    }
};

std::string text_of(const battery::Case& c, bool aligned) {
    return "case " + std::to_string(c.number) + " numel " + std::to_string(c.numel) + " gradient " +
           kTypes[static_cast<int>(c.gradient)] + " shadow " + kTypes[static_cast<int>(c.shadow)] + " state " +
           kTypes[static_cast<int>(c.state)] + (aligned ? " aligned" : " shifted");
}

bool has_step_kernel(const battery::Case& c) { return c.gradient == ElementType::f32 || c.gradient == c.shadow; }

std::string step_kernel(const battery::Case& c) {
    return name_of("step", c.gradient, c.shadow) + (c.state == ElementType::bf16 ? "_noisy" : "");
}

TEST(step_has_the_bits_of_the_scalar_kernel) {
    adam::set_isa("scalar");
    unsigned tried = 0;
    for (const battery::Case& c : battery::cases(false)) {
        if (!has_step_kernel(c)) continue;
        for (const bool aligned : {false, true}) {
            Memory expected(c, aligned);
            Memory got(c, aligned);
            expected.step_here(c);
            const cuda::StepPiece piece = got.piece(c, 0);
            const cuda::StepPiece* pieces = &piece;
            {
                const battery::CallerEnvironment environment(c.environment);
                launch(step_kernel(c), blocks_of(c.numel) + 1, pieces, 1u);
            }
            ++tried;
            if (!EXPECT_FOR(got.equals(expected), text_of(c, aligned))) return;
            if (!EXPECT_FOR(got.intact(), text_of(c, aligned))) return;
        }
    }
    EXPECT(tried > 1000);
}

// Many pieces in one launch, empty ones among them, on grids smaller and larger than their blocks.
TEST(step_finds_its_pieces) {
    adam::set_isa("scalar");
    for (const unsigned grid : {1u, 7u, 400u}) {
        std::vector<std::unique_ptr<Memory>> expected;
        std::vector<std::unique_ptr<Memory>> got;
        std::vector<cuda::StepPiece> pieces;
        std::uint64_t first_block = 0;
        for (const battery::Case& c : battery::cases(false)) {
            if (step_kernel(c) != "step_bf16_bf16" || c.number % 5 != 0) continue;
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

std::uint32_t value_bits(const Guarded& words, ElementType type, std::size_t i) {
    using Lanes = adam::ScalarLanes;
    const std::uint8_t* data = const_cast<Guarded&>(words).data();
    if (type == ElementType::f32) {
        std::uint32_t word;
        std::memcpy(&word, data + 4 * i, 4);
        return word;
    }
    std::uint16_t half;
    std::memcpy(&half, data + 2 * i, 2);
    return Lanes::bits(type == ElementType::bf16 ? Lanes::load_bf16(&half) : Lanes::load_f16(&half));
}

void put_value(Guarded& words, ElementType type, std::size_t i, std::uint32_t bits) {
    using Lanes = adam::ScalarLanes;
    std::uint16_t half = 0;
    if (type == ElementType::f32) {
        std::memcpy(words.data() + 4 * i, &bits, 4);
        return;
    }
    if (type == ElementType::bf16) Lanes::store_bf16(&half, Lanes::canonical(Lanes::from_bits(bits)));
    if (type == ElementType::f16) Lanes::store_f16(&half, Lanes::from_bits(bits));
    std::memcpy(words.data() + 2 * i, &half, 2);
}

// Pieces of several lengths, shifts and contents in one buffer of packed gradients or staged parameters.
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
                // 16-bit formats take the upper half: any pattern is one of theirs
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

const ElementType kPacks[][2] = {{ElementType::f32, ElementType::f32},
                                 {ElementType::bf16, ElementType::bf16},
                                 {ElementType::f16, ElementType::f16},
                                 {ElementType::bf16, ElementType::f32},
                                 {ElementType::f16, ElementType::f32}};

void check_pack(ElementType from, ElementType to, bool hostile, unsigned grid) {
    Pieces p(from, hostile);
    Guarded packed(element_size(to) * p.padded);
    Guarded expected(element_size(to) * p.padded);
    Guarded sums(8 * p.blocks);
    std::vector<double> expected_sums(p.blocks);
    unsigned nonfinite = 0;
    for (std::size_t k = 0; k < p.pieces.size(); ++k) {
        adam::sum_of_squares(p.tensors[k]->data(), from, p.numels[k], expected_sums.data() + p.pieces[k].first_block);
        for (std::size_t i = 0; i < p.numels[k]; ++i) {
            if (from == to) {
                const std::size_t size = element_size(to);
                std::memcpy(expected.data() + size * (p.offsets[k] + i), p.tensors[k]->data() + size * i, size);
            } else {
                put_value(expected, to, p.offsets[k] + i, value_bits(*p.tensors[k], from, i));
            }
        }
    }
    const cuda::CopyPiece* pieces = p.pieces.data();
    void* target = packed.data();
    launch(name_of("pack", from, to), grid, pieces, static_cast<unsigned>(p.pieces.size()), target, sums.as<double>(),
           &nonfinite);
    const std::string where = name_of("pack", from, to) + " grid " + std::to_string(grid);
    EXPECT_FOR(packed.bytes() == expected.bytes(), where);
    EXPECT_FOR(std::memcmp(sums.data(), expected_sums.data(), 8 * p.blocks) == 0, where);
    EXPECT_FOR(packed.intact() && sums.intact(), where);
    bool infinite = false;
    for (const double sum : expected_sums) infinite = infinite || sum == __builtin_inf();
    EXPECT_FOR(nonfinite == (infinite ? 1u : 0u), where);
    EXPECT_FOR(infinite == hostile, where);
}

TEST(pack_has_the_bits_of_the_scalar_kernel) {
    adam::set_isa("scalar");
    for (const auto& types : kPacks) {
        for (const bool hostile : {false, true}) {
            for (const unsigned grid : {1u, 3u, 40u}) check_pack(types[0], types[1], hostile, grid);
        }
    }
}

TEST(pack_of_nothing_does_nothing) {
    unsigned nonfinite = 0;
    const cuda::CopyPiece empty{nullptr, 0, 0, 0};
    const cuda::CopyPiece* pieces = &empty;
    void* packed = nullptr;
    double* sums = nullptr;
    for (const unsigned count : {0u, 1u}) launch("pack_bf16_bf16", 2, pieces, count, packed, sums, &nonfinite);
    EXPECT(nonfinite == 0);
}

TEST(unpack_rounds_as_the_scalar_kernel) {
    const ElementType kinds[][2] = {{ElementType::f32, ElementType::f32},
                                    {ElementType::bf16, ElementType::bf16},
                                    {ElementType::f16, ElementType::f16},
                                    {ElementType::f32, ElementType::bf16},
                                    {ElementType::f32, ElementType::f16}};
    for (const auto& types : kinds) {
        Pieces p(types[1], true);
        const std::size_t size = element_size(types[0]);
        Guarded staged(size * p.padded);
        std::vector<std::unique_ptr<Guarded>> expected;
        for (std::size_t i = 0; i < p.padded; ++i) {
            const std::uint32_t word = battery::hostile_word(battery::mix(i));
            std::memcpy(staged.data() + size * i, &word, size);
        }
        for (std::size_t k = 0; k < p.pieces.size(); ++k) {
            expected.push_back(std::make_unique<Guarded>(element_size(types[1]) * p.numels[k]));
            for (std::size_t i = 0; i < p.numels[k]; ++i) {
                if (types[0] == types[1]) {
                    std::memcpy(expected[k]->data() + size * i, staged.data() + size * (p.offsets[k] + i), size);
                } else {
                    put_value(*expected[k], types[1], i, value_bits(staged, types[0], p.offsets[k] + i));
                }
            }
        }
        const cuda::CopyPiece* pieces = p.pieces.data();
        const void* source = staged.data();
        launch(name_of("unpack", types[0], types[1]), 3, pieces, static_cast<unsigned>(p.pieces.size()), source);
        for (std::size_t k = 0; k < p.pieces.size(); ++k) {
            const std::string where = name_of("unpack", types[0], types[1]) + " piece " + std::to_string(k);
            EXPECT_FOR(p.tensors[k]->bytes() == expected[k]->bytes() && p.tensors[k]->intact(), where);
        }
    }
}

}  // namespace

int main(int argc, char** argv) { return harness::run_all(argc > 1 ? argv[1] : nullptr); }
