#include "host_pieces.h"

#include <cstring>
#include <stdexcept>

namespace superoffload {

void HostPieces::add(void* packed, std::size_t numel, double* block_sums, const void* shadow,
                     std::size_t shadow_bytes) {
    pieces_.push_back({packed, numel, block_sums, shadow, shadow_bytes});
}

void HostPieces::check(std::size_t given) const {
    if (given != pieces_.size()) throw std::invalid_argument("addresses: expected one per piece");
}

void HostPieces::pack(const std::vector<const void*>& gradients) const {
    check(gradients.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
        if (gradients[i] == nullptr) continue;
        adam::pack(gradients[i], pieces_[i].packed, gradient_type_, pieces_[i].numel, pieces_[i].block_sums);
    }
}

void HostPieces::publish(const std::vector<void*>& parameters) const {
    check(parameters.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
        if (parameters[i] != nullptr) std::memcpy(parameters[i], pieces_[i].shadow, pieces_[i].shadow_bytes);
    }
}

}  // namespace superoffload
