#include "device_bucket.h"

namespace superoffload::cuda {
namespace {

constexpr std::size_t kAlign = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
std::uint64_t blocks_of(std::uint64_t numel) { return (numel + adam::kBlock - 1) / adam::kBlock; }

}  // namespace

std::size_t scratch_bytes(const std::vector<std::uint64_t>& numels) {
    std::uint64_t blocks = 0;
    for (const std::uint64_t numel : numels) blocks += blocks_of(numel);
    return Scratch(numels.size(), blocks).end;
}

Scratch::Scratch(std::size_t pieces, std::uint64_t blocks) {
    up_table = aligned(pieces * sizeof(CopyPiece));
    sums = 2 * up_table;
    end = aligned(sums + 8 * blocks);
}

DeviceBucket::DeviceBucket(const std::shared_ptr<Gpu>& gpu, BucketSpec specified)
    : spec(std::move(specified)),
      ready(gpu),
      packed(gpu),
      arrived(gpu),
      readers(gpu),
      staged(gpu),
      delivered(gpu),
      stepped(gpu),
      scratch(0, 0) {
    for (const PieceSpec& piece : spec.pieces) {
        blocks.push_back(blocks_of(piece.numel));
        all_blocks += blocks.back();
    }
    scratch = Scratch(spec.pieces.size(), all_blocks);
}

}  // namespace superoffload::cuda
