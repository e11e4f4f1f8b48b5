// Pool: the three containers of the paper and the driver under them, as one thing to hand around.
//
// Thread-safety: none; the manager's mutex guards it. The driver, the geometry and vset.address()
// may be used without the mutex: they never change.
#pragma once

#include <memory>
#include <utility>

#include "vtensor/driver/driver.h"
#include "vtensor/pool/geometry.h"
#include "vtensor/pool/pset.h"
#include "vtensor/pool/rtree.h"
#include "vtensor/pool/vset.h"

namespace vtensor {

struct Pool {
  Pool(std::unique_ptr<Driver> owned_driver, const Geometry& shape, size_t budget_chunks)
      : driver(std::move(owned_driver)),
        geometry(shape),
        pset(budget_chunks),
        vset(*driver, shape),
        rtree(shape, pset) {}

  std::unique_ptr<Driver> driver;
  Geometry geometry;
  PSet pset;
  VSet vset;
  RTree rtree;
};

}  // namespace vtensor
