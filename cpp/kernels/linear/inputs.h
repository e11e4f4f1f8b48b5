// PreparedInputs: the inputs of a layer with a quantised weight, as its kernels read them.
//
// Thread-safety: prepare() of different rows may run at the same time.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/calls/quantised.h"
#include "kernels/isa/quantised.h"
#include "kernels/parallel.h"

namespace vtensor::kernels {

class PreparedInputs {
 public:
  // Scratch for up to num_rows rows. Throws std::bad_alloc.
  PreparedInputs(Inputs kind, DType dtype, const QuantisedWeight& weight, int64_t num_rows,
                 const QuantisedIsa& isa);

  // Reads rows [first, first + num_rows) of the layer's x, and points `call` to what came of them.
  //
  // kBytes: of the inputs x that share a scale of the weight, scale = max |x| / 127 and
  // 128 + x / scale, rounded to nearest, ties to even (x times 127 / max |x|, both rounded to
  // float32). A row with an infinity or a NaN gives NaN.
  // If the weight rotates inputs, x is divided by rotated_inputs() before, so that no sum
  // overflows, and rotated, in float32; then all of a row share a scale. In groups without the 128;
  // of 4 and 6 bits, of eight inputs 0, 4, 1, 5, 2, 6, 3, 7: as a step has them.
  //
  // kInt16s: of each piece of a row a unit, the power of two by which its largest number lies from
  // 2^14 to 2^15, and x / unit, rounded likewise: bfloat16 numbers down to a 128th of the largest
  // one stay what they are. Of 8 bits in the order 0, 2, 1, 3. A piece whose numbers are all below
  // 2^-100 is zeros; one with an infinity or a NaN gives NaN.
  // Throws std::bad_alloc.
  void prepare(const Parallel& parallel, int num_threads, int64_t first, int64_t num_rows,
               QuantisedCall& call);

 private:
  struct FreeAligned {
    void operator()(uint32_t* p) const;
  };

  // rotated: scratch for a row, where the weight rotates inputs.
  void prepare_row(const LinearCall& layer, int64_t from, int64_t row, float* rotated);
  template <class T>
  void prepare_numbers(const InputKernels<T>& kernels, const T* x, int64_t row, float* rotated);
  template <class T>
  void prepare_bytes(const InputKernels<T>& kernels, const T* x, int64_t row);
  template <class T>
  void prepare_int16s(const InputKernels<T>& kernels, const T* x, int64_t row);

  Inputs kind_;
  DType dtype_;
  const QuantisedWeight& weight_;
  const QuantisedIsa& isa_;
  int64_t piece_;
  int64_t num_pieces_;
  int64_t row_bytes_;
  bool is_copied_;  // pairs of bfloat16 and float32 are read where they stand
  std::unique_ptr<uint32_t[], FreeAligned> rows_;  // AMX reads whole cache lines
  std::unique_ptr<float[]> scales_;
  std::unique_ptr<float[]> sums_;
  std::unique_ptr<int32_t[]> offsets_;
};

}  // namespace vtensor::kernels
