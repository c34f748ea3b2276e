#include "bucket_work.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace superoffload {
namespace {

constexpr std::uint64_t kAlign = 64;

std::uint64_t round_up(std::uint64_t x) { return (x + kAlign - 1) / kAlign * kAlign; }

}  // namespace

BucketWork::BucketWork(std::vector<RunOfShard> runs, std::uint64_t journal_bytes)
    : BucketWork(std::move(runs),
                 journal_bytes == 0 ? nullptr : std::make_shared<JournalMemory>(journal_bytes, journal_bytes)) {}

BucketWork::BucketWork(std::vector<RunOfShard> runs, std::shared_ptr<JournalMemory> journal)
    : journal_(std::move(journal)) {
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
    if (journal_) blocks_.resize(blocks);
}

void BucketWork::set_gradients(const std::vector<const void*>& gradients) {
    if (gradients.size() != parts_.size()) {
        throw std::invalid_argument("gradients: " + std::to_string(gradients.size()) +
                                    " addresses, expected one for each of " + std::to_string(parts_.size()) + " runs");
    }
    for (std::size_t i = 0; i < parts_.size(); ++i) parts_[i].run.gradient = gradients[i];
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

bool BucketWork::take_journal(int width) {
    if (width != 1 && width != 2) throw std::invalid_argument("width: " + std::to_string(width) + ", expected 1 or 2");
    release_journal();
    codes_ = journal_ ? journal_->take_codes(static_cast<std::uint64_t>(width) * padded_) : nullptr;
    if (codes_ == nullptr) return false;
    held_ = Held::unwritten;
    width_ = width;
    return true;
}

bool BucketWork::take_halves() {
    if (!has_split_masters_) return true;
    release_journal();
    halves_ = journal_ ? journal_->take_halves(2 * padded_) : nullptr;
    if (halves_ == nullptr) return false;
    held_ = Held::halves;
    return true;
}

bool BucketWork::publishes() const {
    return !has_split_masters_ || (journal_ && journal_->has_room_for_halves(2 * padded_));
}

void BucketWork::release_journal() {
    if (held_ == Held::unwritten) journal_->written();
    if (held_ == Held::unwritten || held_ == Held::written) journal_->release_codes();
    if (held_ == Held::halves) journal_->release_halves();
    held_ = Held::nothing;
}

void BucketWork::begin_journal(int width) {
    const std::uint64_t bytes = journal_ ? journal_->bytes() : 0;
    if (static_cast<std::uint64_t>(width) * padded_ > bytes) {
        throw std::invalid_argument("journal: " + std::to_string(bytes) + " bytes can never hold codes of " +
                                    std::to_string(width) + " bytes for " + std::to_string(numel_) + " elements");
    }
    const bool has_room = (held_ == Held::unwritten && width_ == width) || take_journal(width);
    width_ = width;
    for (adam::JournalBlock& block : blocks_) block = {adam::JournalBlock::kNotApplied, {}, 0, {}};
    for (Part& part : parts_) {
        part.journaled = part.present && has_room;
        if (!has_room) continue;
        part.run.journal = {codes_ + static_cast<std::uint64_t>(width) * part.code_start,
                            blocks_.data() + part.block_start, journal_->arena(), static_cast<std::uint8_t>(width)};
    }
    overflowed_.store(!has_room, std::memory_order_release);
}

void BucketWork::begin_publish() {
    if (!has_split_masters_) return;
    if (held_ != Held::halves && !take_halves()) {
        throw std::invalid_argument("journal: it has no room for the old upper halves of " + std::to_string(numel_) +
                                    " split masters, 2 bytes each; step the bucket in one pass");
    }
    for (Part& part : parts_) part.run.kept_halves = part.run.split_master ? halves_ + part.code_start : nullptr;
}

void BucketWork::begin(Operation operation, int width) {
    if (operation == Operation::step_journaled) begin_journal(width);
    if (operation == Operation::publish) begin_publish();
    if (operation == Operation::step) release_journal();
    if (operation == Operation::step_journaled || operation == Operation::step) {
        for (Part& part : parts_) {
            if (part.present) part.run.frozen = part.next;
        }
    }
    if ((operation == Operation::undo || operation == Operation::replay) && held_ != Held::written) {
        throw std::logic_error("undo or replay: expected a journaled step before it");
    }
    if (operation == Operation::settle && has_split_masters_ && held_ != Held::halves) {
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

void BucketWork::end(Operation operation) {
    if (operation == Operation::step_journaled && held_ == Held::unwritten) {
        journal_->written();
        held_ = Held::written;
        if (overflowed()) release_journal();
    }
    if (operation == Operation::undo || operation == Operation::replay || operation == Operation::settle) {
        release_journal();
    }
}

bool BucketWork::run_all(Operation operation, int width) {
    begin(operation, width);
    for (std::size_t i = 0; i < chunks_.size(); ++i) run_chunk(operation, i);
    const bool undone = operation == Operation::step_journaled && overflowed();
    if (undone) {
        for (std::size_t i = 0; i < chunks_.size(); ++i) run_chunk(Operation::undo, i);
    }
    end(operation);
    return !undone;
}

JournalUse BucketWork::journal_use() const {
    JournalUse use;
    for (const Part& part : parts_) {
        if (!part.journaled) continue;
        const std::uint64_t blocks = (part.run.numel + adam::kBlock - 1) / adam::kBlock;
        use.bytes += part.run.numel * static_cast<std::uint64_t>(width_) + blocks * sizeof(adam::JournalBlock);
        for (std::uint64_t i = 0; i < blocks; ++i) {
            const adam::JournalBlock& block = part.run.journal.blocks[i];
            std::uint64_t total = 0;
            for (int c = 0; c < 3; ++c) {
                use.escapes[c] += block.escapes[c];
                total += block.escapes[c];
            }
            use.bytes += 4 * (total + (total + 1) / 2);  // old words, and indices of half a word
            use.narrow_escapes += block.narrow_escapes;
        }
    }
    return use;
}

}  // namespace superoffload
