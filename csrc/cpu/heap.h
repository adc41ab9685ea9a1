#pragma once

#include <cstddef>
#include <cstdint>

// Memory that malloc keeps after it was freed. A prompt's activations and the keys that grow among them leave holes,
// which glibc keeps for the life of the process.
namespace mittens::cpu {

// Gives free pages back to the system, where the C library can.
void give_back();

// Gives back before the first token after a prompt, and before the token after one for which mlx-lm's caches grew: each
// layer's keys moved. Called with the sizes of each attention.
void give_back_after_growth(size_t queries, size_t keys);

// How many times this process has given back.
uint64_t times_given_back();

}  // namespace mittens::cpu
