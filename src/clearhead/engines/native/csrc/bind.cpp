// The Python module: which instruction set runs, and what memory it works in.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace clearhead;

namespace clearhead {
namespace baseline { extern const Kernels KERNELS; }
#ifdef CLEARHEAD_X86
namespace avx2 { extern const Kernels KERNELS; }
namespace avx512 { extern const Kernels KERNELS; }
#endif
}  // namespace clearhead

namespace {

// The instruction sets that this CPU has, best first.
std::vector<std::string> available() {
    std::vector<std::string> found;
#ifdef CLEARHEAD_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.push_back("avx512");
    if (avx2) found.push_back("avx2");
#endif
    found.push_back("baseline");
    return found;
}

const Kernels& kernels_of(const std::string& name) {
#ifdef CLEARHEAD_X86
    if (name == "avx512") return avx512::KERNELS;
    if (name == "avx2") return avx2::KERNELS;
#endif
    return baseline::KERNELS;
}

// Memory for one call, given back at its end.
class Workspace {
  public:
    explicit Workspace(int64_t floats) {
        const size_t bytes = ((size_t)floats * sizeof(float) + 63) / 64 * 64;
        memory.reset(static_cast<float*>(std::aligned_alloc(64, bytes ? bytes : 64)));
        if (!memory) throw std::bad_alloc();  // Python's MemoryError
    }
    float* data() const { return memory.get(); }

  private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> memory;
};

// An array from a tensor's data_ptr(), shape and stride(): a dimension of size 1 has stride 0. None: no array.
struct Tensor : Array {
    std::vector<int64_t> shape;

    Tensor(nb::handle tensor) {
        if (tensor.is_none()) return;
        const nb::tuple sizes(tensor.attr("shape")), steps(tensor.attr("stride")());
        for (size_t i = 0; i < sizes.size(); i++) {
            shape.push_back(nb::cast<int64_t>(sizes[i]));
            strides[i] = shape[i] == 1 ? 0 : nb::cast<int64_t>(steps[i]);
        }
        data = reinterpret_cast<void*>(nb::cast<uintptr_t>(tensor.attr("data_ptr")()));
        if (!data && size()) throw nb::value_error("a tensor without memory");
    }
    int64_t size() const {
        int64_t count = 1;
        for (int64_t n : shape) count *= n;
        return count;
    }
};

// A problem's map of blocks. They are those of a mask, of which one sequence or head may stand for all.
void set_blocks(Problem& p, const Blocks& blocks) {
    p.kinds.data = const_cast<int32_t*>(blocks.kinds.data());
    const int64_t head = blocks.tiles * blocks.panels;
    p.kinds.strides[0] = blocks.batch == 1 ? 0 : blocks.heads * head, p.kinds.strides[1] = blocks.heads == 1 ? 0 : head;
    p.kinds.strides[2] = blocks.panels, p.kinds.strides[3] = 1;
    p.bits = blocks.bits.data();
}

// A problem, and the tensors that its arrays lie in.
struct Held {
    Problem problem;
    std::vector<nb::object> tensors;

    Held(int64_t phi, double scale, double softcap, int64_t threads, nb::object query, nb::object key, nb::object value,
         nb::object weight, nb::object sinks, nb::object start, nb::object stop, nb::object blocks, nb::object dense,
         nb::object relative, nb::object bad_queries, nb::object bad_keys, double dropout_p, uint64_t seed,
         int64_t first_query)
        : tensors{query, key, value, weight, sinks, start, stop, blocks, dense, relative, bad_queries, bad_keys} {
        const Tensor q(query), k(key), v(value);
        Problem& p = problem;
        p.phi = phi, p.scale = scale, p.softcap = softcap, p.threads = threads;
        p.batch = q.shape.at(0), p.heads = q.shape.at(1), p.queries = q.shape.at(2), p.width = q.shape.at(3);
        p.key_heads = k.shape.at(1), p.keys = k.shape.at(2), p.value_width = v ? v.shape.at(3) : 0;
        p.query = q, p.key = k, p.value = v, p.weight = Tensor(weight), p.sinks = Tensor(sinks);
        p.start = Tensor(start), p.stop = Tensor(stop), p.dense = Tensor(dense);
        if (!blocks.is_none()) set_blocks(p, nb::cast<const Blocks&>(blocks));
        p.relative = Tensor(relative), p.bad_queries = Tensor(bad_queries), p.bad_keys = Tensor(bad_keys);
        p.dropout_p = dropout_p, p.seed = seed, p.first_query = first_query;
    }
};

// Arrays from a dict of tensors by their names, and the dict, which keeps the tensors alive.
template <class Arrays>
struct Named {
    typedef std::vector<std::pair<const char*, Array Arrays::*>> Names;

    Arrays arrays;
    nb::dict tensors;

    Named(nb::dict given, const Names& names) : tensors(given) {
        for (const auto& [name, array] : names)
            if (tensors.contains(name)) arrays.*array = Tensor(tensors[name]);
    }
};

struct NamedSummary : Named<Summary> {
    NamedSummary(nb::dict tensors, int64_t top, int64_t cell_rows, int64_t cell_columns)
        : Named(tensors, {{"entropy", &Summary::entropy}, {"distance", &Summary::distance},
                          {"position", &Summary::position}, {"best", &Summary::best}, {"best_key", &Summary::best_key},
                          {"values", &Summary::values}, {"indices", &Summary::indices}, {"scores", &Summary::scores},
                          {"received", &Summary::received}, {"mean", &Summary::mean}, {"peak", &Summary::peak},
                          {"factors", &Summary::factors}}) {
        arrays.top = top, arrays.cell_rows = cell_rows, arrays.cell_columns = cell_columns;
    }
};

struct NamedSent : Named<Sent> {
    NamedSent(nb::dict tensors, int64_t k, int64_t cell_rows, int64_t cell_columns)
        : Named(tensors, {{"log_weight", &Sent::log_weight}, {"distance", &Sent::distance}, {"position", &Sent::position},
                          {"best", &Sent::best}, {"best_key", &Sent::best_key}, {"values", &Sent::values},
                          {"indices", &Sent::indices}, {"received", &Sent::received}, {"mean", &Sent::mean},
                          {"factors", &Sent::factors}}) {
        arrays.k = k, arrays.cell_rows = cell_rows, arrays.cell_columns = cell_columns;
    }
};

// The kernels of one instruction set. They run without the GIL: other Python threads run on.
struct Cpu {
    const Kernels* kernels;
    std::string name;

    explicit Cpu(const std::string& isa) : name(isa) {
        bool has = false;
        for (const std::string& one : available()) has = has || one == isa;
        if (!has) throw nb::value_error("this CPU or this build has no such instruction set; see available()");
        kernels = &kernels_of(isa);
    }

    bool forward(const Held& held, bool few, nb::handle out, nb::handle maximum, nb::handle log_sum) const {
        Problem p = held.problem;
        p.out = Tensor(out), p.maximum = Tensor(maximum), p.log_sum = Tensor(log_sum);
        nb::gil_scoped_release release;
        if (few) return kernels->decode(p, Workspace(kernels->decode_floats(p)).data());
        return kernels->forward(p, Workspace(kernels->forward_floats(p)).data());
    }
    void merge(const Held& held, nb::handle out, nb::handle maximum, nb::handle log_sum) const {
        Problem p = held.problem;
        p.out = Tensor(out), p.maximum = Tensor(maximum), p.log_sum = Tensor(log_sum), p.merges = true;
        nb::gil_scoped_release release;
        kernels->forward(p, Workspace(kernels->forward_floats(p)).data());
    }
    void backward(const Held& held, nb::handle grad, nb::handle maximum, nb::handle log_sum, nb::handle delta,
                  nb::handle query, nb::handle key, nb::handle value, nb::handle weight, nb::handle dense,
                  nb::handle relative, const NamedSent* sent, bool adds) const {
        const Problem& p = held.problem;
        const Tensor to_dense(dense), to_relative(relative);
        Gradients g;
        g.grad = Tensor(grad), g.maximum = Tensor(maximum), g.log_sum = Tensor(log_sum), g.delta = Tensor(delta);
        g.query = Tensor(query), g.key = Tensor(key), g.value = Tensor(value), g.weight = Tensor(weight);
        g.dense = to_dense, g.relative = to_relative;
        g.dense_size = to_dense.size(), g.relative_size = to_relative.size();
        g.adds = adds;
        if (sent) g.sent = sent->arrays;
        nb::gil_scoped_release release;
        kernels->backward(p, g, Workspace(kernels->backward_floats(p, g)).data());
    }
    void contributions(const Held& held, nb::handle grad, nb::handle maximum, nb::handle log_sum, const NamedSent* sent,
                       nb::handle by_query, nb::handle by_key, bool positive) const {
        Gradients g;
        g.grad = Tensor(grad), g.maximum = Tensor(maximum), g.log_sum = Tensor(log_sum);
        g.by_query = Tensor(by_query), g.by_key = Tensor(by_key), g.positive = positive;
        if (sent) g.sent = sent->arrays;
        nb::gil_scoped_release release;
        kernels->contributions(held.problem, g, Workspace(kernels->contributions_floats(held.problem, g)).data());
    }
    bool summarise(const Held& held, nb::handle out, nb::handle maximum, nb::handle log_sum, const NamedSummary& named) const {
        const Summary& summary = named.arrays;
        Problem p = held.problem;
        p.out = Tensor(out), p.maximum = Tensor(maximum), p.log_sum = Tensor(log_sum);
        nb::gil_scoped_release release;
        return kernels->summarise(p, summary, Workspace(kernels->summary_floats(p, summary)).data());
    }
    void scores(const Held& held, nb::handle out) const {
        Problem p = held.problem;
        p.out = Tensor(out);
        nb::gil_scoped_release release;
        kernels->scores(p, Workspace(kernels->scores_floats(p)).data());
    }
    int64_t forward_bytes(const Held& held) const { return 4 * kernels->forward_floats(held.problem); }
};

}  // namespace

NB_MODULE(_kernels, m) {
    nb::set_leak_warnings(false);  // compiled code of torch's may hold these objects until the process ends
    const auto number = nb::arg(), tensor = nb::arg();
    const auto maybe = nb::arg().none();  // a tensor or None
    nb::class_<Blocks>(m, "Blocks")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t>())
        .def("add",
             [](Blocks& blocks, nb::handle start, nb::handle stop, nb::handle gap_start, nb::handle gap_stop, nb::handle keep,
                int64_t first, int64_t last) {
                 const Tensor gap(gap_start);
                 const int64_t gaps = gap ? gap.shape.at(3) : 0;
                 blocks.add(Tensor(start), Tensor(stop), gap, Tensor(gap_stop), gaps, Tensor(keep), first, last);
             },
             tensor, tensor, maybe, maybe, maybe, number, number)
        .def_ro("batch", &Blocks::batch)
        .def_ro("heads", &Blocks::heads)
        .def_prop_ro("pairs", &Blocks::pairs)
        .def_prop_ro("bytes", [](const Blocks& b) { return 4 * b.kinds.size() + 8 * b.bits.size(); });
    nb::class_<Held>(m, "Problem")
        .def(nb::init<int64_t, double, double, int64_t, nb::object, nb::object, nb::object, nb::object, nb::object,
                      nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, double,
                      uint64_t, int64_t>(),
             number, number, number, number, tensor, tensor, maybe, maybe, maybe, maybe, maybe, maybe, maybe, maybe, maybe,
             maybe, number, number, number);
    nb::class_<NamedSummary>(m, "Summary").def(nb::init<nb::dict, int64_t, int64_t, int64_t>());
    nb::class_<NamedSent>(m, "Sent").def(nb::init<nb::dict, int64_t, int64_t, int64_t>());
    nb::class_<Cpu>(m, "Cpu")
        .def(nb::init<const std::string&>())
        .def_ro("name", &Cpu::name)
        .def("forward", &Cpu::forward, nb::arg(), number, tensor, maybe, maybe)
        .def("backward", &Cpu::backward, nb::arg(), maybe, tensor, tensor, tensor, maybe, maybe, maybe, maybe, maybe, maybe,
             maybe, number)
        .def("merge", &Cpu::merge, nb::arg(), tensor, tensor, tensor)
        .def("contributions", &Cpu::contributions, nb::arg(), maybe, tensor, tensor, maybe, maybe, maybe, number)
        .def("summarise", &Cpu::summarise, nb::arg(), maybe, maybe, maybe, number)
        .def("scores", &Cpu::scores)
        .def("forward_bytes", &Cpu::forward_bytes);
    m.def("available", &available);
}
