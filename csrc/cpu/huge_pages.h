#pragma once

#include <cstddef>
#include <cstdint>

// Pages of 2 MB for weights. A token reads each weight once, so that every page of 4 KB costs a walk of the page table,
// and a prefetch does not cross from one to the next.
namespace mittens::cpu {

// Products of more rows read weights for longer than memory takes.
constexpr size_t most_noted_rows = 8;

// Notes that a product of few rows reads these bytes. Weights that are read again and again get large pages, one by one
// so that no token waits for all; the bytes stay where they are. Does nothing where the system has no such call, or
// where its administrator turned large pages off.
void note_weights(const void* data, size_t bytes);

// How often this process made a large page, or found it made.
uint64_t huge_pages_made();

}  // namespace mittens::cpu
