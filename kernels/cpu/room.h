// Memory that kernels work in, once for each instruction set.

namespace ISA {

// Memory of a thread, kept from one task to the next.
class Room {
 public:
  // A part of it for as many numbers as each of `sizes` says.
  template <size_t kParts>
  void divide(const int64_t (&sizes)[kParts], float** const (&parts)[kParts]) {
    int64_t total = 0;
    for (int64_t size : sizes) total += whole_lines(size);
    if (total > capacity_) {
      std::free(memory_);
      memory_ = static_cast<float*>(std::aligned_alloc(64, total * sizeof(float)));
      if (!memory_) std::abort();  // a few hundred KiB
      capacity_ = total;
    }
    float* at = memory_;
    for (size_t i = 0; i < kParts; at += whole_lines(sizes[i++])) *parts[i] = at;
  }

  ~Room() { std::free(memory_); }

 private:
  static int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

  float* memory_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace ISA
