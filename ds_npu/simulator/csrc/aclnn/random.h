// Random bits that are a function of a seed, an offset and a position.
#pragma once

#include <cstdint>

namespace sim {

// The output function of SplitMix64: a permutation of 64-bit numbers in which each bit of the result depends on all of `x`.
inline uint64_t scrambled(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// One number for the two, different for all offsets of a seed.
inline uint64_t mixed(uint64_t seed, uint64_t offset) {
  return scrambled(scrambled(seed + 0x9e3779b97f4a7c15ULL) + offset);
}

// The bits at `position` of the sequence `key`; SplitMix64 with random access.
inline uint64_t random_bits(uint64_t key, uint64_t position) { return scrambled(key + (position + 1) * 0x9e3779b97f4a7c15ULL); }

}  // namespace sim
