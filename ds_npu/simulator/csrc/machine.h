// The machine that is simulated, in numbers: ds_npu/topology/machines.json, of which `ds_npu sim` hands the profile of the
// chip over. The same seconds are computed by ds_npu/topology/machine.py, which explains them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace sim {

// Rates by a size, ascending; between two entries linear in the size's logarithm.
using Curve = std::vector<std::pair<double, double>>;

// A phase of a collective: within nodes, between them, or both at the same time; of all bytes, or of a node's rank's share.
struct Phase {
  enum Level { kNear, kFar, kBoth } level;
  bool share;
};

struct Machine {
  double cores;           // cube cores
  double matmul;          // FLOP/s of products in 16 bits, on whole tiles
  double matmul_float32;  // FLOP/s of products in float32
  Curve memory;           // bytes/s that an operator reads and writes, by the bytes of its tensors
  Curve attention;        // FLOP/s of attention, by the keys of a call
  double kernel;          // seconds of a kernel, to which its arithmetic is added
  double sorting_passes;  // how often an operator that sorts reads and writes its tensors
  double message;         // seconds of a message or collective however small it is
  double port;            // bytes/s to all other ranks of the node together
  double link;            // bytes/s to one other rank of the node
  double network;         // bytes/s to ranks of other nodes
  double hop;             // seconds of each step of a collective between nodes
  int64_t node;           // NPUs of a node
  std::map<std::string, std::vector<Phase>> collectives;
  double host;            // bytes/s between device memory and pinned memory of the host
  // Seconds of the host: to dispatch a task (host.h says of what kind), and to launch it.
  double dispatch, dispatch_fused, dispatch_autograd, dispatch_collective, dispatch_event, launch;
  std::size_t stream_tasks, queue_tasks;  // that fit on a stream, and into torch_npu's queue before it

  double operator_seconds(double arithmetic, double moved) const;
  double memory_seconds(double moved) const;
  // Of arithmetic, of `count` products [rows, inner] @ [inner, columns].
  double product_seconds(int64_t rows, int64_t columns, int64_t inner, int64_t itemsize, int64_t count) const;
  double attention_seconds(double flop, double keys) const;
  // To send bytes to `peers` ranks of the node together and, at the same time, to other nodes.
  double sending_seconds(double near, int64_t peers, double far) const;
  // Of a collective over `near` ranks on each of `nodes` nodes; `bytes` are those of the whole buffer.
  double collective_seconds(const std::string& kind, double bytes, int64_t near, int64_t nodes) const;
};

// Throws Failure for a text that lacks a number: "cores=24 memory=50331648:3.5e12,201326592:1.28e12 ...".
Machine machine_from(const std::string& text);

const Machine& machine();

}  // namespace sim
