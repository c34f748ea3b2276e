// Packs the many small pieces of a bucket in host memory, or copies them to their parameters, in one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../arm_adam/adam.h"

namespace superoffload {

class HostPieces {
   public:
    explicit HostPieces(adam::ElementType gradient_type) : gradient_type_(gradient_type) {}

    // Adds a piece: where its gradient is packed (null: it stays in place), and `shadow_bytes` of shadow to publish.
    void add(void* packed, std::size_t numel, double* block_sums, const void* shadow, std::size_t shadow_bytes);

    // Packs one gradient per piece (null: none) with its block sums.
    void pack(const std::vector<const void*>& gradients) const;
    // Copies the shadow of every piece to its parameter (null: no copy).
    void publish(const std::vector<void*>& parameters) const;

   private:
    struct Piece {
        void* packed;
        std::size_t numel;
        double* block_sums;
        const void* shadow;
        std::size_t shadow_bytes;
    };
    void check(std::size_t given) const;

    adam::ElementType gradient_type_;
    std::vector<Piece> pieces_;
};

}  // namespace superoffload
