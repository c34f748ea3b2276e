// Tests the kernels on every instruction set of this machine against the scalar ones: same bits, same journal, no write
// outside. The Python tests check the scalar arithmetic against an independent reference.
#include <algorithm>
#include <thread>

#include "bucket.h"
#include "harness.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace harness;

namespace {

using Bytes = std::vector<std::uint8_t>;

std::vector<std::string> isas() {
    const char* names[8];
    const std::size_t count = adam::available_isas(names, 8);
    return {names, names + count};
}

// Selects an instruction set for one scope.
class With {
   public:
    explicit With(const std::string& name) : before_(adam::current_isa()) {
        EXPECT_FOR(adam::set_isa(name.c_str()), name);
    }
    ~With() { adam::set_isa(before_.c_str()); }

   private:
    std::string before_;
};

// Holds every result of one case on one instruction set.
struct Outcome {
    Bytes initial, stepped, stepped_shadow, published_shadow, settled, journaled, journaled_shadow, escapes, undone,
        replayed, replayed_shadow, stepped_again;
    bool fits = false;
    bool publish_reads_only = false;
    bool intact = false;
};

Outcome outcome_of(const Case& c) {
    Bucket bucket(c);
    Outcome o;
    const adam::Scalars first = adam::freeze(hyper_of(c.seed, c.l2));
    adam::Hyper clipped = hyper_of(c.seed, c.l2);
    clipped.gradient_factor *= 0.25;
    const adam::Scalars second = adam::freeze(clipped);

    o.initial = bucket.state();
    const Bytes before = bucket.unpublished();
    adam::publish(bucket.run(first), bucket.all());
    o.published_shadow = bucket.shadow();
    o.publish_reads_only = bucket.unpublished() == before;
    adam::step(bucket.settling(first), bucket.all());
    o.settled = bucket.state();
    bucket.reset();
    adam::step(bucket.run(first), bucket.all());
    o.stepped = bucket.state();
    o.stepped_shadow = bucket.shadow();

    bucket.reset();
    adam::step(bucket.run(second), bucket.all());
    o.stepped_again = bucket.state();

    bucket.reset();
    o.fits = adam::step_journaled(bucket.run(first), bucket.all());
    o.journaled = bucket.state();
    o.journaled_shadow = bucket.shadow();
    o.escapes = bucket.escapes();
    adam::undo(bucket.run(first), bucket.all());
    o.undone = bucket.state();

    bucket.reset();
    adam::step_journaled(bucket.run(first), bucket.all());
    adam::replay(bucket.run(first), bucket.all(), second);
    o.replayed = bucket.state();
    o.replayed_shadow = bucket.shadow();
    o.intact = bucket.intact();
    return o;
}

bool consistent(const Outcome& o, const std::string& where) {
    return EXPECT_FOR(o.publish_reads_only, where) && EXPECT_FOR(o.published_shadow == o.stepped_shadow, where) &&
           EXPECT_FOR(o.settled == o.stepped, where) && EXPECT_FOR(o.fits, where) &&
           EXPECT_FOR(o.journaled == o.stepped, where) && EXPECT_FOR(o.journaled_shadow == o.stepped_shadow, where) &&
           EXPECT_FOR(o.undone == o.initial, where) && EXPECT_FOR(o.replayed == o.stepped_again, where) &&
           EXPECT_FOR(o.intact, where);
}

bool same(const Outcome& a, const Outcome& b, const std::string& where) {
    return EXPECT_FOR(a.stepped == b.stepped, where) && EXPECT_FOR(a.stepped_shadow == b.stepped_shadow, where) &&
           EXPECT_FOR(a.escapes == b.escapes, where) && EXPECT_FOR(a.replayed == b.replayed, where) &&
           EXPECT_FOR(a.replayed_shadow == b.replayed_shadow, where);
}

bool agrees_everywhere(const Case& c) {
    Outcome scalar;
    for (const std::string& isa : isas()) {
        const With selected(isa);
        const Outcome here = outcome_of(c);
        const std::string where = isa + " " + c.text();
        if (!consistent(here, where)) return false;
        if (isa == "scalar") {
            scalar = here;
        } else if (!same(here, scalar, where)) {
            return false;
        }
    }
    return true;
}

// Makes the i-th combination of types, mode, code width, contents and misalignment.
constexpr std::size_t kCombinations = 432;  // without the offsets
Case combination(std::size_t i, std::size_t numel) {
    Case c;
    c.numel = numel;
    c.gradient = static_cast<ElementType>(i % 3);
    c.shadow = static_cast<ElementType>(i / 3 % 3);
    c.l2 = i / 9 % 2 == 1;
    c.width = i / 18 % 2 == 1 ? 2 : 1;
    c.contents = i / 36 % 2 == 1 ? Contents::hostile : Contents::trained;
    c.state = i / 72 % 3 == 2 ? ElementType::q8 : static_cast<ElementType>(i / 72 % 3);
    c.split = i / 216 % 2 == 1;
    if (c.split) c.shadow = ElementType::bf16;
    c.offset = (i * 7 + i / kCombinations) % 16;
    c.seed = i;
    return c;
}

TEST(every_length_to_4096) {
    for (std::size_t numel = 0; numel <= 4096; ++numel) {
        if (!agrees_everywhere(combination(numel * 5 + numel / kCombinations, numel))) return;
    }
}

TEST(every_combination_and_offset) {
    for (std::size_t i = 0; i < kCombinations * 16; ++i) {
        if (!agrees_everywhere(combination(i * 145, 1 + i % 67))) return;
    }
}

TEST(every_hyper_parameter_edge) {
    for (std::size_t i = 0; i < kCombinations; ++i) {
        for (std::uint64_t edge = 0; edge < 11; ++edge) {
            Case c = combination(i, 200 + 13 * i);
            c.seed = edge;
            if (!agrees_everywhere(c)) return;
        }
    }
}

// The calling thread's floating-point environment must not matter, and must be restored.
#if defined(__x86_64__)
std::uint64_t control() { return _mm_getcsr() & 0xffc0u; }
void set_control(std::uint64_t value) { _mm_setcsr(static_cast<unsigned>(value)); }
constexpr std::uint64_t kOddControls[] = {0x9fc0, 0xffc0, 0x5f80};  // flush to zero, with rounding toward zero, up
#elif defined(__aarch64__)
std::uint64_t control() {
    std::uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}
void set_control(std::uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
constexpr std::uint64_t kOddControls[] = {1u << 24, 3u << 22, 1u << 25};  // flush to zero, toward zero, default NaN
#endif

#if defined(__x86_64__) || defined(__aarch64__)
TEST(callers_float_environment_does_not_matter) {
    const std::uint64_t usual = control();
    for (const std::string& isa : isas()) {
        const With selected(isa);
        for (std::size_t i = 0; i < kCombinations; ++i) {
            Case c = combination(i, 1100);
            const Outcome expected = outcome_of(c);
            for (const std::uint64_t odd : kOddControls) {
                Bucket bucket(c);
                const adam::Hyper hyper = hyper_of(c.seed, c.l2);
                set_control(odd);
                const adam::Scalars scalars = adam::freeze(hyper);
                adam::step_journaled(bucket.run(scalars), bucket.all());
                const Bytes journaled = bucket.state();
                adam::undo(bucket.run(scalars), bucket.all());
                const bool kept = control() == odd;
                set_control(usual);
                const std::string where = isa + " " + c.text();
                EXPECT_FOR(kept, where);
                if (!EXPECT_FOR(journaled == expected.stepped, where)) return;
                if (!EXPECT_FOR(bucket.state() == expected.initial, where)) return;
            }
        }
    }
}
#endif

// A full arena is reported before anything is lost: stepped blocks can be undone, the others are unchanged.
TEST(full_arena_loses_nothing) {
    for (const std::string& isa : isas()) {
        const With selected(isa);
        for (std::size_t i = 0; i < kCombinations; ++i) {
            Case c = combination(i, 4 * adam::kBlock + 77);
            c.contents = Contents::hostile;
            const adam::Scalars scalars = adam::freeze(hyper_of(c.seed, c.l2));
            Bucket whole(c);
            adam::step_journaled(whole.run(scalars), whole.all());
            const std::size_t enough = whole.arena().used;
            for (const std::size_t words : {std::size_t{0}, enough / 3, enough - 1}) {
                const std::string where = isa + " " + c.text() + " arena=" + std::to_string(words);
                Bucket bucket(c, words);
                const Bytes initial = bucket.state();
                if (!EXPECT_FOR(!adam::step_journaled(bucket.run(scalars), bucket.all()), where)) return;
                if (words == 0 && !EXPECT_FOR(bucket.state() == initial, where)) return;
                if (!EXPECT_FOR(bucket.arena().used <= words, where)) return;  // blocks without room are not counted
                adam::undo(bucket.run(scalars), bucket.all());
                if (!EXPECT_FOR(bucket.state() == initial, where) || !EXPECT_FOR(bucket.intact(), where)) return;
            }
            Bucket exact(c, enough);
            if (!EXPECT_FOR(adam::step_journaled(exact.run(scalars), exact.all()), isa + " " + c.text())) return;
        }
    }
}

// This number, which two-byte codes count on the way, decides a bucket's next code width.
TEST(narrow_escapes_are_those_that_one_byte_codes_have) {
    for (const std::string& isa : isas()) {
        const With selected(isa);
        for (std::size_t i = 0; i < kCombinations; ++i) {
            Case c = combination(i, adam::kBlock + 100);
            const adam::Scalars scalars = adam::freeze(hyper_of(c.seed, c.l2));
            c.width = 1;
            Bucket narrow(c);
            adam::step_journaled(narrow.run(scalars), narrow.all());
            c.width = 2;
            Bucket wide(c);
            adam::step_journaled(wide.run(scalars), wide.all());
            for (std::size_t k = 0; k < blocks_of(c.numel); ++k) {
                const std::uint16_t* escapes = narrow.block(k).escapes;
                const int expected = escapes[0] + escapes[1] + escapes[2];
                const std::string where = isa + " " + c.text() + " block=" + std::to_string(k);
                if (!EXPECT_FOR(narrow.block(k).narrow_escapes == expected, where)) return;
                if (!EXPECT_FOR(wide.block(k).narrow_escapes == expected, where)) return;
            }
        }
    }
}

// Threads that share a bucket and its arena, in any order of block ranges, give the bits of one thread.
TEST(threads_share_a_bucket) {
    for (const std::string& isa : isas()) {
        const With selected(isa);
        for (std::size_t i = 0; i < kCombinations; i += 5) {
            const Case c = combination(i, 9 * adam::kBlock + 13);
            const Outcome expected = outcome_of(c);
            const adam::Scalars scalars = adam::freeze(hyper_of(c.seed, c.l2));
            Bucket bucket(c);
            const auto on_threads = [&](auto work) {
                std::vector<std::thread> threads;
                for (std::size_t t = 0; t < 3; ++t) {
                    threads.emplace_back([&, t] {
                        for (std::size_t begin = t * adam::kBlock; begin < c.numel; begin += 3 * adam::kBlock) {
                            work(adam::Range{begin, std::min(begin + adam::kBlock, c.numel)});
                        }
                    });
                }
                for (std::thread& thread : threads) thread.join();
            };
            on_threads([&](adam::Range range) { EXPECT(adam::step_journaled(bucket.run(scalars), range)); });
            if (!EXPECT_FOR(bucket.state() == expected.stepped, isa + " " + c.text())) return;
            on_threads([&](adam::Range range) { adam::undo(bucket.run(scalars), range); });
            if (!EXPECT_FOR(bucket.state() == expected.initial, isa + " " + c.text())) return;
        }
    }
}

// NaN has one pattern wherever it is stored; without this, "same bits" would hold only for lucky operand orders.
TEST(nan_is_stored_as_one_pattern) {
    for (const std::string& isa : isas()) {
        const With selected(isa);
        std::size_t seen = 0;
        for (std::size_t i = 36; i < kCombinations; ++i) {
            const Case c = combination(i, 1000);
            Bucket bucket(c);
            adam::step(bucket.run(adam::freeze(hyper_of(c.seed, c.l2))), bucket.all());
            for (int component = 0; component < 3; ++component) {
                for (std::size_t k = 0; k < c.numel; ++k) {
                    const float x = bucket.value(component, k);
                    if (!std::isnan(x)) continue;
                    ++seen;
                    if (!EXPECT_FOR(bits_of(x) == 0x7fc00000u, isa + " " + c.text())) return;
                }
            }
        }
        EXPECT_FOR(seen > 1000, isa);
    }
}

// A step moves the weights as AdamW says, in plain double precision: "all the same" could also mean "all wrong".
TEST(step_is_adamw) {
    for (const std::string& isa : isas()) {
        const With selected(isa);
        Case c = combination(0, 3000);  // fp32 gradient, trained contents
        Bucket before(c);
        Bucket after(c);
        const adam::Hyper h = hyper_of(0, false);
        adam::step(after.run(adam::freeze(h)), after.all());
        const auto* gradient = static_cast<const float*>(before.gradient());
        for (std::size_t i = 0; i < c.numel; ++i) {
            const double g = gradient[i];
            const double m = h.beta1 * before.value(0, i) + (1 - h.beta1) * g;
            const double v = h.beta2 * before.value(1, i) + (1 - h.beta2) * g * g;
            const auto step = static_cast<double>(h.step);
            const double denominator = std::sqrt(v / (1 - std::pow(h.beta2, step))) + h.eps;
            const double p = before.value(2, i) * (1 - h.lr * h.weight_decay) -
                             h.lr / (1 - std::pow(h.beta1, step)) * m / denominator;
            const bool close = std::abs(after.value(0, i) - m) <= 1e-6 * std::abs(m) + 1e-9 &&
                               std::abs(after.value(1, i) - v) <= 1e-6 * v &&
                               std::abs(after.value(2, i) - p) <= 2e-7 * std::abs(p) + 1e-9;
            if (!EXPECT_FOR(close, isa + " element " + std::to_string(i))) return;
        }
    }
}

TEST(pack_copies_and_sums_alike) {
    for (std::size_t i = 0; i < 600; ++i) {
        Case c = combination(i, i < 100 ? i : i * 7);
        Bucket bucket(c);
        Bytes copy(adam::element_size(c.gradient) * c.numel);
        std::vector<double> scalar;
        for (const std::string& isa : isas()) {
            const With selected(isa);
            const std::string where = isa + " " + c.text();
            std::vector<double> summed(blocks_of(c.numel), -1);
            std::vector<double> packed(blocks_of(c.numel), -1);
            adam::sum_of_squares(bucket.gradient(), c.gradient, c.numel, summed.data());
            adam::pack(bucket.gradient(), copy.data(), c.gradient, c.numel, packed.data());
            if (isa == "scalar") scalar = summed;
            const std::size_t size = scalar.size() * sizeof(double);
            const bool alike = size == 0 || (std::memcmp(summed.data(), scalar.data(), size) == 0 &&
                                             std::memcmp(packed.data(), scalar.data(), size) == 0);
            if (!EXPECT_FOR(alike, where)) return;
            if (!EXPECT_FOR(copy.empty() || std::memcmp(copy.data(), bucket.gradient(), copy.size()) == 0, where))
                return;
        }
    }
}

TEST(one_bad_element_makes_its_block_infinite) {
    for (const std::string& isa : isas()) {
        const With selected(isa);
        std::vector<float> gradient(3 * adam::kBlock + 5, 1.0f);
        for (const std::uint32_t bad : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffffffffu, 0x7f800001u}) {
            for (std::size_t at = 0; at < gradient.size(); at += 101) {
                std::memcpy(&gradient[at], &bad, sizeof bad);
                std::vector<double> sums(4);
                adam::sum_of_squares(gradient.data(), ElementType::f32, gradient.size(), sums.data());
                for (std::size_t block = 0; block < 4; ++block) {
                    const double expected = block == 3 ? 5 : adam::kBlock;
                    if (block == at / adam::kBlock) {
                        EXPECT_FOR(sums[block] == HUGE_VAL, isa);
                    } else {
                        EXPECT_FOR(sums[block] == expected, isa);
                    }
                }
                gradient[at] = 1.0f;
            }
        }
    }
}

TEST(huge_gradients_do_not_overflow_a_sum) {
    for (const std::string& isa : isas()) {
        const With selected(isa);
        const std::vector<float> gradient(adam::kBlock, 3.4028235e38f);
        double sum = 0;
        adam::sum_of_squares(gradient.data(), ElementType::f32, gradient.size(), &sum);
        EXPECT_FOR(std::isfinite(sum) && sum > 1e80, isa);
    }
}

TEST(unknown_instruction_set_is_refused) {
    const std::string before = adam::current_isa();
    EXPECT(!adam::set_isa("mmx"));
    EXPECT(!adam::set_isa(""));
    EXPECT(before == adam::current_isa());
    EXPECT(isas().front() == "scalar");
    EXPECT(isas().back() == before || std::getenv("SUPEROFFLOAD_ISA") != nullptr);
}

}  // namespace

int main(int argc, char** argv) {
    std::printf("instruction sets:");
    for (const std::string& isa : isas()) std::printf(" %s", isa.c_str());
    std::printf("\n");
    return run_all(argc > 1 ? argv[1] : nullptr);
}
