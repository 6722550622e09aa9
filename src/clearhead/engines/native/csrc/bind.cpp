// The Python module: which instruction set runs, and what memory it works in.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

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

// The kernels of one instruction set.
struct Cpu {
    const Kernels* kernels;
    std::string name;

    explicit Cpu(const std::string& isa) : name(isa) {
        bool has = false;
        for (const std::string& one : available()) has = has || one == isa;
        if (!has) throw nb::value_error("this CPU or this build has no such instruction set; see available()");
        kernels = &kernels_of(isa);
    }

    bool forward(const Problem& p) const {
        nb::gil_scoped_release release;
        return kernels->forward(p, Workspace(kernels->forward_floats(p)).data());
    }
    bool decode(const Problem& p) const {
        nb::gil_scoped_release release;
        return kernels->decode(p, Workspace(kernels->decode_floats(p)).data());
    }
    void backward(const Problem& p, const Gradients& g) const {
        nb::gil_scoped_release release;
        kernels->backward(p, g, Workspace(kernels->backward_floats(p, g)).data());
    }
    bool summarise(const Problem& p, const Summary& s) const {
        nb::gil_scoped_release release;
        return kernels->summarise(p, s, Workspace(kernels->summary_floats(p, s)).data());
    }
    void scores(const Problem& p) const {
        nb::gil_scoped_release release;
        kernels->scores(p, Workspace(kernels->scores_floats(p)).data());
    }
    int64_t forward_bytes(const Problem& p) const { return 4 * kernels->forward_floats(p); }
};

}  // namespace

NB_MODULE(_kernels, m) {
    nb::set_leak_warnings(false);  // compiled code of torch's may hold these objects until the process ends
    nb::class_<Array>(m, "Array")
        .def("__init__", [](Array* a, uintptr_t data, int64_t batch, int64_t head, int64_t row, int64_t column) {
            new (a) Array{reinterpret_cast<void*>(data), {batch, head, row, column}};
        }, nb::arg(), nb::arg() = 0, nb::arg() = 0, nb::arg() = 0, nb::arg() = 0);
    nb::class_<Problem>(m, "Problem")
        .def(nb::init<>())
        .def_rw("phi", &Problem::phi)
        .def_rw("batch", &Problem::batch)
        .def_rw("heads", &Problem::heads)
        .def_rw("key_heads", &Problem::key_heads)
        .def_rw("queries", &Problem::queries)
        .def_rw("keys", &Problem::keys)
        .def_rw("width", &Problem::width)
        .def_rw("value_width", &Problem::value_width)
        .def_rw("threads", &Problem::threads)
        .def_rw("scale", &Problem::scale)
        .def_rw("softcap", &Problem::softcap)
        .def_rw("query", &Problem::query)
        .def_rw("key", &Problem::key)
        .def_rw("value", &Problem::value)
        .def_rw("weight", &Problem::weight)
        .def_rw("sinks", &Problem::sinks)
        .def_rw("start", &Problem::start)
        .def_rw("stop", &Problem::stop)
        .def_rw("keep", &Problem::keep)
        .def_rw("dense", &Problem::dense)
        .def_rw("relative", &Problem::relative)
        .def_rw("bad_queries", &Problem::bad_queries)
        .def_rw("bad_keys", &Problem::bad_keys)
        .def_rw("dropout_p", &Problem::dropout_p)
        .def_rw("seed", &Problem::seed)
        .def_rw("first_query", &Problem::first_query)
        .def_rw("out", &Problem::out)
        .def_rw("stats", &Problem::stats);
    nb::class_<Summary>(m, "Summary")
        .def(nb::init<>())
        .def_rw("entropy", &Summary::entropy)
        .def_rw("largest", &Summary::largest)
        .def_rw("rest", &Summary::rest)
        .def_rw("values", &Summary::values)
        .def_rw("indices", &Summary::indices)
        .def_rw("received", &Summary::received)
        .def_rw("mean", &Summary::mean)
        .def_rw("peak", &Summary::peak)
        .def_rw("k", &Summary::k)
        .def_rw("cell_rows", &Summary::cell_rows)
        .def_rw("cell_columns", &Summary::cell_columns);
    nb::class_<Gradients>(m, "Gradients")
        .def(nb::init<>())
        .def_rw("grad", &Gradients::grad)
        .def_rw("delta", &Gradients::delta)
        .def_rw("query", &Gradients::query)
        .def_rw("key", &Gradients::key)
        .def_rw("value", &Gradients::value)
        .def_rw("weight", &Gradients::weight)
        .def_rw("dense", &Gradients::dense)
        .def_rw("relative", &Gradients::relative)
        .def_rw("dense_size", &Gradients::dense_size)
        .def_rw("relative_size", &Gradients::relative_size);
    nb::class_<Cpu>(m, "Cpu")
        .def(nb::init<const std::string&>())
        .def_ro("name", &Cpu::name)
        .def("forward", &Cpu::forward)
        .def("decode", &Cpu::decode)
        .def("backward", &Cpu::backward)
        .def("summarise", &Cpu::summarise)
        .def("scores", &Cpu::scores)
        .def("forward_bytes", &Cpu::forward_bytes);
    m.def("available", &available);
}
