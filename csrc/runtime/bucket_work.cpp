#include "bucket_work.h"

#include <stdexcept>
#include <string>

#include "huge_pages.h"

namespace superoffload {
namespace {

constexpr std::uint64_t kAlign = 64;

std::uint64_t round_up(std::uint64_t x) { return (x + kAlign - 1) / kAlign * kAlign; }

}  // namespace

BucketWork::BucketWork(std::vector<RunOfShard> runs, std::uint64_t journal_bytes) : journal_bytes_(journal_bytes) {
    std::uint64_t blocks = 0;
    for (const auto& [run, noise_stream] : runs) {
        Part part{};
        part.run = run;
        part.noise_stream = noise_stream;
        part.code_start = padded_;
        part.block_start = blocks;
        for (std::size_t begin = 0; begin < run.numel; begin += kChunk) {
            const std::size_t end = begin + kChunk < run.numel ? begin + kChunk : run.numel;
            chunks_.push_back({parts_.size(), {begin, end}});
        }
        numel_ += run.numel;
        has_split_masters_ = has_split_masters_ || run.split_master;
        padded_ += round_up(run.numel);
        blocks += (run.numel + adam::kBlock - 1) / adam::kBlock;
        parts_.push_back(part);
    }
    if (journal_bytes_ == 0) return;
    // No page is taken before its first use.
    journal_.reset(static_cast<std::uint32_t*>(::operator new(round_up(journal_bytes_), kJournalAlign)));
    prefer_huge_pages(journal_.get(), journal_bytes_);
    blocks_.resize(blocks);
}

void BucketWork::freeze(const adam::Hyper& hyper, const std::vector<std::uint64_t>& steps) {
    if (steps.size() != parts_.size()) {
        throw std::invalid_argument("steps: " + std::to_string(steps.size()) + " numbers, expected one for each of " +
                                    std::to_string(parts_.size()) + " runs");
    }
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        Part& part = parts_[i];
        part.present = steps[i] != 0;
        if (!part.present) continue;
        adam::Hyper of_run = hyper;
        of_run.step = steps[i];
        part.next = adam::freeze(of_run, part.noise_stream);
    }
}

void BucketWork::begin_journal(int width) {
    if (width != 1 && width != 2) throw std::invalid_argument("width: " + std::to_string(width) + ", expected 1 or 2");
    if (!width_fits(width)) {
        throw std::invalid_argument("journal: " + std::to_string(journal_bytes_) + " bytes cannot hold codes of " +
                                    std::to_string(width) + " bytes for " + std::to_string(numel_) + " elements");
    }
    width_ = width;
    const std::uint64_t code_words = static_cast<std::uint64_t>(width) * padded_ / 4;
    arena_ = {journal_.get() + code_words, journal_bytes_ / 4 - code_words, 0};
    // The last block of a full arena may begin where the arena ends, and no offset may be kNotApplied.
    if (arena_.capacity >= adam::JournalBlock::kNotApplied) arena_.capacity = adam::JournalBlock::kNotApplied - 1;
    for (adam::JournalBlock& block : blocks_) block = {adam::JournalBlock::kNotApplied, {0, 0, 0}, 0};
    auto* codes = reinterpret_cast<std::uint8_t*>(journal_.get());
    for (Part& part : parts_) {
        part.journaled = part.present;
        part.run.journal = {codes + static_cast<std::uint64_t>(width) * part.code_start,
                            blocks_.data() + part.block_start, &arena_, static_cast<std::uint8_t>(width)};
    }
    overflowed_.store(false, std::memory_order_release);
    keeps_halves_ = false;
}

// Gives split masters the journal's memory for their old upper halves, so what it holds can be undone no more.
void BucketWork::begin_publish() {
    if (!has_split_masters_) return;
    if (!publishes()) {
        throw std::invalid_argument("journal: " + std::to_string(journal_bytes_) + " bytes cannot keep 2 bytes for " +
                                    std::to_string(numel_) + " split masters; step the bucket in one pass");
    }
    width_ = 0;
    auto* const halves = reinterpret_cast<std::uint16_t*>(journal_.get());
    for (Part& part : parts_) {
        part.journaled = false;
        part.run.kept_halves = part.run.split_master ? halves + part.code_start : nullptr;
    }
    keeps_halves_ = true;
}

void BucketWork::begin(Operation operation, int width) {
    if (operation == Operation::step_journaled) begin_journal(width);
    if (operation == Operation::publish) begin_publish();
    if (operation == Operation::step_journaled || operation == Operation::step) {
        for (Part& part : parts_) {
            if (part.present) part.run.frozen = part.next;
        }
    }
    if ((operation == Operation::undo || operation == Operation::replay) && width_ == 0) {
        throw std::logic_error("undo or replay: expected a journaled step before it");
    }
    if (operation == Operation::settle && has_split_masters_ && !keeps_halves_) {
        throw std::logic_error("settle: split masters need a publish before it, which keeps their old upper halves");
    }
}

void BucketWork::run_chunk(Operation operation, std::size_t chunk) {
    const Part& part = parts_[chunks_[chunk].part];
    const adam::Range range = chunks_[chunk].range;
    switch (operation) {
        case Operation::step:
            if (part.present) adam::step(part.run, range);
            break;
        case Operation::step_journaled:
            if (!part.present || overflowed()) break;
            if (!adam::step_journaled(part.run, range)) overflowed_.store(true, std::memory_order_release);
            break;
        case Operation::undo:
            if (part.journaled) adam::undo(part.run, range);
            break;
        case Operation::replay:
            if (part.journaled) adam::replay(part.run, range, part.next);
            break;
        case Operation::publish:
            if (part.present) {  // with its own scalars: a journal keeps those it was written with
                adam::Run run = part.run;
                run.frozen = part.next;
                adam::publish(run, range);
            }
            break;
        case Operation::settle:
            if (part.present) {  // likewise; a publish of another chunk may be reading, but not what is written here
                adam::Run run = part.run;
                run.frozen = part.next;
                run.shadow = nullptr;
                adam::step(run, range);
            }
            break;
    }
}

bool BucketWork::run_all(Operation operation, int width) {
    begin(operation, width);
    for (std::size_t i = 0; i < chunks_.size(); ++i) run_chunk(operation, i);
    if (operation != Operation::step_journaled || !overflowed()) return true;
    for (std::size_t i = 0; i < chunks_.size(); ++i) run_chunk(Operation::undo, i);
    return false;
}

JournalUse BucketWork::journal_use() const {
    JournalUse use;
    if (width_ == 0) return use;
    for (const Part& part : parts_) {
        if (!part.journaled) continue;
        const std::uint64_t blocks = (part.run.numel + adam::kBlock - 1) / adam::kBlock;
        use.bytes += part.run.numel * static_cast<std::uint64_t>(width_) + blocks * sizeof(adam::JournalBlock);
        for (std::uint64_t i = 0; i < blocks; ++i) {
            const adam::JournalBlock& block = part.run.journal.blocks[i];
            for (int c = 0; c < 3; ++c) use.escapes[c] += block.escapes[c];
            use.narrow_escapes += block.narrow_escapes;
        }
    }
    use.bytes += arena_.used * 4;
    return use;
}

}  // namespace superoffload
