// Runs a fixed battery for every kernel. It prints only one digest per operation on standard output, so that the
// outputs of two machines, instruction sets or vector lengths can be compared as they are. Inputs come from an integer
// hash. It also checks what one machine can show: undo restores every bit, replay is undo and step, publish gives the
// step's shadow and settle its state, nothing is written out of bounds, and the caller's floating-point environment
// comes back.
//
//   battery [--isa NAME] [--full]
//
// Without --isa, every instruction set of this machine runs and all must agree. --full: many more lengths.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/prctl.h>
#endif

#include "arm_adam/adam.h"
#include "battery_inputs.h"
#include "guarded.h"

namespace {

using namespace superoffload::adam;
using harness::Guarded;

enum Operation { kFreeze, kStep, kPublish, kJournal1, kJournal2, kFullArena, kReplay, kSums, kOperations };
constexpr const char* kNames[kOperations] = {"freeze",   "step",       "publish", "journal1",
                                             "journal2", "full-arena", "replay",  "sums"};

struct Digest {
    std::uint64_t value = 0x632be59bd9b4e019u;

    void word(std::uint64_t x) {
        value = (value ^ x) * 0x9e3779b97f4a7c15u;
        value ^= value >> 29;
    }
    void bytes(const void* data, std::size_t size) {
        const auto* p = static_cast<const unsigned char*>(data);
        for (; size >= 4; p += 4, size -= 4) {
            std::uint32_t x;
            std::memcpy(&x, p, 4);
            word(x);
        }
        for (; size != 0; ++p, --size) word(*p);
        word(0x100);  // marks the end of an array
    }
};

using Digests = std::vector<Digest>;
int failures = 0;

void check(bool ok, const char* what, const battery::Case& c) {
    if (ok) return;
    ++failures;
    std::fprintf(stderr,
                 "FAILED %s: isa %s, case %u, length %zu, gradient %d, shadow %d, split %d, l2 %d, environment %u\n",
                 what, current_isa(), c.number, c.numel, static_cast<int>(c.gradient), static_cast<int>(c.shadow),
                 c.split, c.hyper.l2, c.environment);
}

// Holds the memory of one run: guarded arrays at odd offsets, and a journal.
struct Memory {
    Guarded master, exp_avg, exp_avg_sq, gradient, shadow, kept, codes, exp_avg_scales, exp_avg_sq_scales;
    std::vector<JournalBlock> blocks;
    std::vector<std::uint32_t> words;
    JournalArena arena;
    Run run{};

    explicit Memory(const battery::Case& c)
        : master((c.split ? 2 : 4) * c.numel, (c.split ? 2 : 4) * c.offset),
          exp_avg(element_size(c.state) * c.numel, element_size(c.state) * (c.offset + 3)),
          exp_avg_sq(element_size(c.state) * c.numel, element_size(c.state) * (c.offset + 6)),
          gradient(element_size(c.gradient) * c.numel, element_size(c.gradient) * c.offset),
          shadow(element_size(c.shadow) * c.numel, element_size(c.shadow) * (c.offset + 1)),
          kept(c.split ? 2 * c.numel : 0, 2 * (c.offset + 5)),
          codes(2 * c.numel, 2 * c.offset),
          exp_avg_scales(battery::scales_of(c), c.offset),
          exp_avg_sq_scales(battery::scales_of(c), c.offset + 1),
          blocks(c.numel / kBlock + 1),
          words(5 * c.numel + 8),
          arena{words.data(), words.size(), 0} {
        fill(c);
        std::memset(codes.data(), 0, codes.size());
        run = {master.data(),
               exp_avg.data(),
               exp_avg_sq.data(),
               gradient.data(),
               shadow.data(),
               {codes.data(), blocks.data(), &arena, 1},
               c.numel,
               c.gradient,
               c.shadow,
               freeze(c.hyper, c.number),
               c.state};
        run.split_master = c.split;
        run.kept_halves = c.split ? kept.as<std::uint16_t>() : nullptr;
        battery::place(run, c.number);
        if (c.state != ElementType::q8) return;
        run.exp_avg_scales = exp_avg_scales.data();
        run.exp_avg_sq_scales = exp_avg_sq_scales.data();
    }

    Range range() const { return {0, run.numel}; }
    // Steps behind a publish, which has written the shadow.
    void settle() {
        Run settling = run;
        settling.shadow = nullptr;
        step(settling, range());
    }
    void state_into(Digest& digest) {
        digest.bytes(master.data(), master.size());
        digest.bytes(exp_avg.data(), exp_avg.size());
        digest.bytes(exp_avg_sq.data(), exp_avg_sq.size());
        digest.bytes(exp_avg_scales.data(), exp_avg_scales.size());
        digest.bytes(exp_avg_sq_scales.data(), exp_avg_sq_scales.size());
        if (run.split_master) digest.bytes(shadow.data(), shadow.size());
    }
    bool state_equals(Memory& other) {
        return master.bytes() == other.master.bytes() && exp_avg.bytes() == other.exp_avg.bytes() &&
               exp_avg_sq.bytes() == other.exp_avg_sq.bytes() &&
               exp_avg_scales.bytes() == other.exp_avg_scales.bytes() &&
               exp_avg_sq_scales.bytes() == other.exp_avg_sq_scales.bytes() &&
               (!run.split_master || shadow.bytes() == other.shadow.bytes());
    }
    bool intact() {
        return master.intact() && exp_avg.intact() && exp_avg_sq.intact() && gradient.intact() && shadow.intact() &&
               kept.intact() && codes.intact() && exp_avg_scales.intact() && exp_avg_sq_scales.intact();
    }

   private:
    void fill(const battery::Case& c) {
        battery::fill_scales(c, exp_avg_scales.data(), exp_avg_sq_scales.data());
        if (!c.split) {
            battery::fill(c, master.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data());
            std::memset(shadow.data(), 0, shadow.size());
            return;
        }
        std::vector<std::uint8_t> whole(4 * c.numel);
        battery::fill(c, whole.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data());
        battery::split(whole.data(), c.numel, shadow.as<std::uint16_t>(), master.as<std::int16_t>());
    }
};

// Adds the defined codes: the code of an escaped component depends on which NaN a processor makes.
void codes_into(Digest& digest, Memory& memory) {
    const int width = memory.run.journal.width;
    const std::uint32_t masks[2][3] = {{0xf, 0x30, 0xc0}, {0x7f, 0x3f80, 0xc000}};
    std::vector<std::uint32_t> codes(memory.run.numel);
    for (std::size_t i = 0; i < codes.size(); ++i) {
        std::memcpy(&codes[i], memory.codes.data() + static_cast<std::size_t>(width) * i,
                    static_cast<std::size_t>(width));
    }
    for (std::size_t begin = 0; begin < codes.size(); begin += kBlock) {
        const JournalBlock& block = memory.blocks[begin / kBlock];
        const int total = block.escapes[0] + block.escapes[1] + block.escapes[2];
        const unsigned char* old = reinterpret_cast<const unsigned char*>(memory.words.data() + block.offset);
        const unsigned char* index = old + 4 * total;
        digest.bytes(old, static_cast<std::size_t>(6 * total));
        for (int component = 0; component < 3; ++component) {
            digest.word(block.escapes[component]);
            for (int i = 0; i < block.escapes[component]; ++i, index += 2) {
                std::uint16_t at;
                std::memcpy(&at, index, 2);
                codes[begin + at] &= ~masks[width - 1][component];
            }
        }
        digest.word(block.narrow_escapes);
        digest.bytes(block.scales, sizeof block.scales);
    }
    digest.bytes(codes.data(), 4 * codes.size());
}

void stepped(const battery::Case& c, Digests& digests) {
    Memory memory(c);
    const Scalars& s = memory.run.frozen;
    digests[kFreeze].bytes(&s, offsetof(Scalars, l2));
    digests[kFreeze].word(s.noise_key);
    step(memory.run, memory.range());
    memory.state_into(digests[kStep]);
    digests[kStep].bytes(memory.shadow.data(), memory.shadow.size());

    Memory two_phase(c);
    publish(two_phase.run, two_phase.range());
    digests[kPublish].bytes(two_phase.shadow.data(), two_phase.shadow.size());
    check(two_phase.shadow.bytes() == memory.shadow.bytes(), "publish gives the shadow of the step", c);
    two_phase.settle();
    check(two_phase.state_equals(memory) && two_phase.shadow.bytes() == memory.shadow.bytes(),
          "publish and settle are the step", c);
    check(memory.intact() && two_phase.intact(), "step, publish and settle stay in bounds", c);
}

void journaled(const battery::Case& c, int width, Digests& digests) {
    Memory before(c);
    Memory plain(c);
    Memory memory(c);
    memory.run.journal.width = static_cast<std::uint8_t>(width);
    step(plain.run, plain.range());
    check(step_journaled(memory.run, memory.range()), "the arena is large enough", c);
    check(memory.state_equals(plain) && memory.shadow.bytes() == plain.shadow.bytes(), "journaled is plain", c);
    Digest& digest = digests[width == 1 ? kJournal1 : kJournal2];
    memory.state_into(digest);
    codes_into(digest, memory);

    // Replays from a copy of the journal, with other scalars; then does the same by undo and step.
    battery::Case clipped = c;
    clipped.hyper.gradient_factor *= 0.25;
    Memory again(c);
    again.run.journal.width = memory.run.journal.width;
    step_journaled(again.run, again.range());
    replay(again.run, again.range(), freeze(clipped.hyper, clipped.number));
    again.state_into(digests[kReplay]);
    digests[kReplay].bytes(again.shadow.data(), again.shadow.size());
    Memory expected(clipped);
    step(expected.run, expected.range());
    check(again.state_equals(expected) && again.shadow.bytes() == expected.shadow.bytes(), "replay is undo and step",
          c);

    undo(memory.run, memory.range());
    check(memory.state_equals(before), "undo restores every bit", c);
    check(memory.intact() && again.intact(), "journal, undo and replay stay in bounds", c);
}

void full_arena(const battery::Case& c, Digests& digests) {
    Memory before(c);
    Memory memory(c);
    memory.run.journal.width = static_cast<std::uint8_t>(1 + c.number % 2);
    memory.arena.capacity = c.numel / 4;
    for (JournalBlock& block : memory.blocks) block.offset = JournalBlock::kNotApplied;
    digests[kFullArena].word(step_journaled(memory.run, memory.range()) ? 1 : 0);
    memory.state_into(digests[kFullArena]);
    undo(memory.run, memory.range());
    check(memory.state_equals(before), "a full arena loses nothing", c);
    check(memory.intact(), "a full arena stays in bounds", c);
}

void summed(const battery::Case& c, Digests& digests) {
    Memory memory(c);
    Guarded packed(memory.gradient.size(), 2 * c.offset + element_size(c.gradient));
    std::vector<double> sums((c.numel + kBlock - 1) / kBlock);
    std::vector<double> only(sums.size());
    pack(memory.gradient.data(), packed.data(), c.gradient, c.numel, sums.data());
    sum_of_squares(memory.gradient.data(), c.gradient, c.numel, only.data());
    const double total = fold_sums(sums.data(), sums.size());
    digests[kSums].bytes(sums.data(), 8 * sums.size());
    digests[kSums].bytes(&total, sizeof total);
    check(packed.bytes() == memory.gradient.bytes() && packed.intact(), "pack copies", c);
    check(sums.empty() || std::memcmp(sums.data(), only.data(), 8 * sums.size()) == 0, "pack sums as sum_of_squares",
          c);
}

Digests run_battery(bool full) {
    Digests digests(kOperations);
    for (const battery::Case& c : battery::cases(full)) {
        const battery::CallerEnvironment environment(c.environment);
        stepped(c, digests);
        journaled(c, 1 + static_cast<int>(c.number % 2), digests);
        full_arena(c, digests);
        summed(c, digests);
        check(environment.unchanged(), "the caller's floating-point environment comes back", c);
    }
    return digests;
}

bool same(const Digests& a, const Digests& b) {
    for (int i = 0; i < kOperations; ++i) {
        if (a[i].value != b[i].value) return false;
    }
    return true;
}

// Names the vector length that was tried, since SVE's vectors have no fixed length.
std::string vector_length([[maybe_unused]] const std::string& isa) {
#if defined(__aarch64__) && defined(PR_SVE_GET_VL)
    if (isa == "sve") return " " + std::to_string(8 * (prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK)) + " bits";
#endif
    return "";
}

int run_sets(const std::vector<std::string>& names, bool full) {
    Digests first;
    for (const std::string& name : names) {
        if (!set_isa(name.c_str())) {
            std::fprintf(stderr, "--isa %s: not built in, or this processor lacks it\n", name.c_str());
            return EXIT_FAILURE;
        }
        const Digests digests = run_battery(full);
        if (first.empty()) first = digests;
        const bool agrees = same(first, digests);
        std::fprintf(stderr, "%s%s: %s\n", name.c_str(), vector_length(name).c_str(),
                     agrees ? "done" : "FAILED: differs from the first set");
        if (!agrees) ++failures;
        if (agrees && &name != &names.front()) continue;
        for (int i = 0; i < kOperations; ++i) {
            std::printf("%-10s %016llx\n", kNames[i], static_cast<unsigned long long>(digests[i].value));
        }
    }
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> names;
    bool full = false;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--full") == 0) {
            full = true;
        } else if (std::strcmp(argv[i], "--isa") == 0 && i + 1 < argc) {
            names.emplace_back(argv[++i]);
        } else {
            std::fprintf(stderr, "%s: unknown argument; usage: battery [--isa NAME] [--full]\n", argv[i]);
            return EXIT_FAILURE;
        }
    }
    if (names.empty()) {
        const char* found[8];
        const std::size_t count = available_isas(found, 8);
        names.assign(found, found + count);
    }
    return run_sets(names, full);
}
