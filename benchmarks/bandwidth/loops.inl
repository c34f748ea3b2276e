// Defines the loops for one vector width. Included once per width, in a namespace of its own, with these defined:
// WIDTH_NAME, WIDTH_BYTES, WIDTH_TARGET (a function attribute, or nothing), STREAM_STORE(address, vector).
namespace WIDTH_NAME {

using Vector = std::uint32_t __attribute__((vector_size(WIDTH_BYTES), aligned(1), may_alias));

// The compiler does not know that `zero` is 0, so it can leave out neither the load nor the store.
WIDTH_TARGET void update(std::uint8_t* base, std::size_t bytes, std::uint32_t zero) {
    const std::size_t whole = bytes / WIDTH_BYTES * WIDTH_BYTES;
    for (std::size_t i = 0; i < whole; i += WIDTH_BYTES) {
        auto* at = reinterpret_cast<Vector*>(base + i);
        *at = *at ^ zero;
    }
    for (std::size_t i = whole; i < bytes; ++i) base[i] ^= static_cast<std::uint8_t>(zero);
}

// The compiler has to assume that the loaded values are used; adding them up would take too long for short blocks.
WIDTH_TARGET void read(const std::uint8_t* base, std::size_t bytes) {
    const std::size_t whole = bytes / WIDTH_BYTES * WIDTH_BYTES;
    const std::size_t pairs = bytes / (2 * WIDTH_BYTES) * (2 * WIDTH_BYTES);
    Vector even{};
    Vector odd{};
    for (std::size_t i = 0; i < pairs; i += 2 * WIDTH_BYTES) {
        even |= *reinterpret_cast<const Vector*>(base + i);
        odd |= *reinterpret_cast<const Vector*>(base + i + WIDTH_BYTES);
    }
    if (pairs != whole) even |= *reinterpret_cast<const Vector*>(base + pairs);
    even |= odd;
    __asm__ volatile("" : : "m"(even));
    std::uint32_t rest = 0;
    for (std::size_t i = whole; i < bytes; ++i) rest |= base[i];
    __asm__ volatile("" : : "r"(rest));
}

WIDTH_TARGET void write(std::uint8_t* base, std::size_t bytes, std::uint32_t zero) {
    const std::size_t whole = bytes / WIDTH_BYTES * WIDTH_BYTES;
    const Vector value = Vector{} ^ zero;
    for (std::size_t i = 0; i < whole; i += WIDTH_BYTES) *reinterpret_cast<Vector*>(base + i) = value;
    for (std::size_t i = whole; i < bytes; ++i) base[i] = static_cast<std::uint8_t>(zero);
}

WIDTH_TARGET void write_streaming(std::uint8_t* base, std::size_t bytes, std::uint32_t zero) {
    const std::size_t whole = bytes / WIDTH_BYTES * WIDTH_BYTES;
    const Vector value = Vector{} ^ zero;
    for (std::size_t i = 0; i < whole; i += WIDTH_BYTES) STREAM_STORE(base + i, value);
    for (std::size_t i = whole; i < bytes; ++i) base[i] = static_cast<std::uint8_t>(zero);
}

constexpr Loops kLoops{WIDTH_BYTES, update, read, write, write_streaming};

}  // namespace WIDTH_NAME

#undef WIDTH_NAME
#undef WIDTH_BYTES
#undef WIDTH_TARGET
#undef STREAM_STORE
