// The binding of Parcel: its files as numbers of descriptors, its places as flat lists of numbers.
#include "bindings/parcel.h"

#include <fcntl.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <memory>
#include <stdexcept>
#include <utility>

#include "vtensor/core/parcel.h"
#include "vtensor/util/error.h"
#include "vtensor/util/text.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vtensor {
namespace {

// [file, offset, file, offset, ...]
std::vector<uint64_t> places_of(const Parcel& parcel) {
  std::vector<uint64_t> flat;
  flat.reserve(2 * parcel.chunks.places.size());
  for (const ChunkPlace& place : parcel.chunks.places) {
    flat.push_back(place.file);
    flat.push_back(place.offset_bytes);
  }
  return flat;
}

// The descriptors stay the caller's.
void make_parcel(Parcel* made, const std::vector<int>& files, const std::vector<uint64_t>& places,
                 std::vector<bool> is_there, size_t num_tokens, bool continues) {
  if (places.size() % 2 != 0) throw std::invalid_argument("places are pairs of file and offset");
  Parcel parcel;
  for (const int file : files) {
    const int copy = fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
      const int code = errno;
      throw DriverError("fcntl(F_DUPFD_CLOEXEC)", code, errno_text(code),
                        "fd=" + std::to_string(file));
    }
    parcel.chunks.files.emplace_back(copy);
  }
  for (size_t i = 0; i < places.size(); i += 2) {
    if (places[i] >= files.size()) {
      throw std::invalid_argument("a chunk in file " + std::to_string(places[i]) + " of " +
                                  std::to_string(files.size()));
    }
    parcel.chunks.places.push_back({static_cast<uint32_t>(places[i]), places[i + 1]});
  }
  parcel.is_there = std::move(is_there);
  parcel.num_tokens = num_tokens;
  parcel.continues = continues;
  new (made) Parcel(std::move(parcel));
}

}  // namespace

void bind_parcel(nb::module_& module) {
  nb::class_<Parcel>(module, "Parcel")
      .def("__init__", &make_parcel, "files"_a, "places"_a, "is_there"_a, "num_tokens"_a,
           "continues"_a)
      .def_prop_ro("files",
                   [](const Parcel& self) {
                     std::vector<int> files;
                     for (const FileDescriptor& file : self.chunks.files) {
                       files.push_back(file.get());
                     }
                     return files;
                   })
      .def_prop_ro("places", &places_of)
      .def_ro("is_there", &Parcel::is_there)
      .def_ro("num_tokens", &Parcel::num_tokens)
      .def_ro("continues", &Parcel::continues)
      .def_ro("num_copied", &Parcel::num_copied)
      .def("close", [](Parcel& self) { self.chunks.files.clear(); });
}

}  // namespace vtensor
