// The Python module: which instruction set runs, and what memory it works in.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"
#include "cpu.h"
#include "given.h"
#include "kernels.h"

using namespace clearhead;

namespace clearhead {
namespace baseline { extern const Kernels KERNELS; }
namespace avx2 { extern const Kernels KERNELS; }
namespace avx512 { extern const Kernels KERNELS; }
namespace avx512_bf16 { extern const Kernels KERNELS; }
}  // namespace clearhead

namespace {

struct Build {
    const char* name;
    int level;  // of cpu.h
    const Kernels* kernels;
};

// The builds of the kernels, best first. An editable installation has the baseline and that of its CPU.
const Build BUILDS[] = {
#ifdef CLEARHEAD_AVX512_BF16
    {"avx512_bf16", 3, &avx512_bf16::KERNELS},
#endif
#ifdef CLEARHEAD_AVX512
    {"avx512", 2, &avx512::KERNELS},
#endif
#ifdef CLEARHEAD_AVX2
    {"avx2", 1, &avx2::KERNELS},
#endif
    {"baseline", 0, &baseline::KERNELS},
};

// The instruction sets that this CPU and this build have, best first.
std::vector<std::string> available() {
    std::vector<std::string> found;
    for (const Build& build : BUILDS)
        if (build.level <= level_of_cpu()) found.push_back(build.name);
    return found;
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

// The gaps between a mask's intervals; none where there are no tensors.
struct Gaps {
    Given start, stop;
    int64_t count = 0;

    Gaps(nb::handle gap_start, nb::handle gap_stop, int64_t batch, int64_t heads, int64_t queries) : start(gap_start, "the start of the gaps") {
        require(gap_start.is_none() == gap_stop.is_none(), "gaps have starts and stops.");
        count = start.there() ? start.sizes[3] : 0;
        const int64_t wanted[] = {batch, heads, queries, count};
        if (start.there()) start.check(gap_start, "the start of the gaps", EDGES, wanted, 4);
        stop = Given(gap_stop, "the stop of the gaps", EDGES, {batch, heads, queries, count});
    }
};

// A problem, and the tensors that its arrays lie in.
struct Held {
    Problem problem;
    Given dense, relative;
    std::vector<nb::object> tensors;

    Held(int64_t phi, double scale, double softcap, int64_t threads, nb::object query, nb::object key, nb::object value,
         nb::object weight, nb::object sinks, nb::object start, nb::object stop, nb::object gap_start, nb::object gap_stop,
         nb::object blocks, nb::object to_dense, nb::object to_relative, nb::object bad_queries, nb::object bad_keys, double dropout_p, uint64_t seed,
         int64_t first_query)
        : tensors{query, key, value, weight, sinks, start, stop, gap_start, gap_stop, blocks, to_dense, to_relative, bad_queries, bad_keys} {
        // query and key say what the sizes are
        Given q(query, "query"), k(key, "key"), v(value, "value");
        require(q.count == 4 && k.count == 4 && (v.count == 4 || !v.there()), "query, key and value have four dimensions.");
        Problem& p = problem;
        p.phi = phi, p.scale = scale, p.softcap = softcap, p.threads = threads;
        p.batch = q.sizes[0], p.heads = q.sizes[1], p.queries = q.sizes[2], p.width = q.sizes[3];
        p.key_heads = k.sizes[1], p.keys = k.sizes[2], p.value_width = v.there() ? v.sizes[3] : 0;
        const int64_t b = p.batch, h = p.heads, hk = p.key_heads, lq = p.queries, lk = p.keys;
        const int64_t of_query[] = {b, h, lq, p.width}, of_key[] = {b, hk, lk, p.width}, of_value[] = {b, hk, lk, p.value_width};
        q.check(query, "query", ROWS_OF, of_query, 4), k.check(key, "key", ROWS_OF, of_key, 4);
        if (v.there()) v.check(value, "value", ROWS_OF, of_value, 4);
        if (hk < 1 || h % hk)
            refuse(std::to_string(h) + " heads of query are not shared by " + std::to_string(hk) + " heads of key.");
        require(phi >= 0 && phi < PHI_COUNT && threads >= 1 && softcap >= 0 && std::isfinite(softcap), "a number of the problem is none.");
        p.query = q, p.key = k, p.value = v;
        p.weight = Given(weight, "weight", VECTOR, {p.width}), p.sinks = Given(sinks, "sinks", VECTOR, {h});
        p.start = Given(start, "the start of the spans", EDGES, {b, h, lq});
        p.stop = Given(stop, "the stop of the spans", EDGES, {b, h, lq});
        require(start.is_none() == stop.is_none(), "spans have starts and stops.");
        const Gaps gaps(gap_start, gap_stop, b, h, lq);
        p.gap_start = gaps.start, p.gap_stop = gaps.stop, p.gaps = gaps.count;
        p.dense = dense = Given(to_dense, "the dense bias", ANY, {b, h, lq, lk});
        p.relative = relative = Given(to_relative, "the relative bias", ALONG, {b, h, std::max<int64_t>(lq + lk - 1, 0)});
        p.bad_queries = Given(bad_queries, "the poison of the queries", PER_QUERY, {b, h, lq});
        p.bad_keys = Given(bad_keys, "the poison of the keys", ALONG, {b, hk, lk});
        require(bad_queries.is_none() == bad_keys.is_none(), "the poison is of queries and keys.");
        if (!blocks.is_none()) set_blocks(nb::cast<const Blocks&>(blocks));
        p.dropout_p = dropout_p, p.seed = seed, p.first_query = first_query;
    }

    // The problem's map of blocks. It is the map of a mask, in which one sequence or head may stand for all.
    void set_blocks(const Blocks& blocks) {
        Problem& p = problem;
        const auto of = [](int64_t n, int64_t all) { return n == 1 || n == all; };
        if (!of(blocks.batch, p.batch) || !of(blocks.heads, p.heads) || blocks.queries != p.queries || blocks.keys != p.keys) {
            const auto shown = [](int64_t b, int64_t h, int64_t q, int64_t k) {
                return "(" + std::to_string(b) + ", " + std::to_string(h) + ", " + std::to_string(q) + ", " + std::to_string(k) + ")";
            };
            refuse("the map of blocks was made for a mask of " + shown(blocks.batch, blocks.heads, blocks.queries, blocks.keys) +
                   "; expected one of " + shown(p.batch, p.heads, p.queries, p.keys) + ".");
        }
        p.tiles.data = const_cast<Runs*>(blocks.of_tile.data());
        p.tiles.strides[0] = blocks.batch == 1 ? 0 : blocks.heads * blocks.tiles;
        p.tiles.strides[1] = blocks.heads == 1 ? 0 : blocks.tiles, p.tiles.strides[2] = 1;
        p.runs = blocks.runs.data(), p.bits = blocks.bits.data();
    }

    // The same with the arrays that a kernel writes its output and rows to, which may be missing.
    Problem to(nb::handle out, int64_t width, nb::handle maximum, nb::handle log_sum) const {
        Problem p = problem;
        p.out = Given(out, "the output", TO_ROWS, {p.batch, p.heads, p.queries, width});
        p.maximum = Given(maximum, "maximum", TO_NUMBERS, {p.batch, p.heads, p.queries});
        p.log_sum = Given(log_sum, "log_sum", TO_NUMBERS, {p.batch, p.heads, p.queries});
        require(maximum.is_none() == log_sum.is_none(), "maximum and log_sum go together.");
        return p;
    }
};

// The kinds of entries that the arrays of a summary and of `Sent` have.
enum Of { QUERIES, LARGEST, KEYS, CELLS };

// Arrays from a dict of tensors by their names, and the dict, which keeps the tensors alive.
template <class Arrays>
struct Named {
    struct Entry {
        const char* name;
        Array Arrays::*array;
        Of of;
        Expected expected;
    };

    nb::dict tensors;
    int64_t top, cell_rows, cell_columns;

    Named(nb::dict given, int64_t top, int64_t cell_rows, int64_t cell_columns)
        : tensors(given), top(top), cell_rows(cell_rows), cell_columns(cell_columns) {
        require(top >= 0 && cell_rows >= 1 && cell_columns >= 1, "a number of weights or of a cell is none.");
    }

    Arrays arrays_of(const Problem& p, const std::vector<Entry>& entries) const {
        Arrays arrays;
        for (const Entry& entry : entries) {
            if (!tensors.contains(entry.name)) continue;
            const nb::object tensor = tensors[entry.name];
            Given found;
            if (entry.of == QUERIES) found = Given(tensor, entry.name, entry.expected, {p.batch, p.heads, p.queries});
            if (entry.of == LARGEST) found = Given(tensor, entry.name, entry.expected, {p.batch, p.heads, p.queries, top});
            if (entry.of == KEYS) found = Given(tensor, entry.name, entry.expected, {p.batch, p.heads, p.keys});
            if (entry.of == CELLS) {
                const int64_t rows = (p.queries + cell_rows - 1) / cell_rows, columns = (p.keys + cell_columns - 1) / cell_columns;
                found = Given(tensor, entry.name, entry.expected, {p.batch, p.heads, rows, columns});
            }
            arrays.*entry.array = found;
        }
        arrays.cell_rows = cell_rows, arrays.cell_columns = cell_columns;
        return arrays;
    }
    bool has(const char* name) const { return tensors.contains(name); }
    void together(const char* one, const char* other) const {
        if (has(one) && !has(other)) refuse(std::string(one) + " is given without " + other + ".");
    }
};

struct NamedSummary : Named<Summary> {
    using Named::Named;

    Summary of(const Problem& p) const {
        Summary s = arrays_of(p, {{"entropy", &Summary::entropy, QUERIES, TO_NUMBERS},
                                  {"distance", &Summary::distance, QUERIES, TO_NUMBERS},
                                  {"position", &Summary::position, QUERIES, KEYS_PER_QUERY},
                                  {"best", &Summary::best, QUERIES, TO_NUMBERS},
                                  {"best_key", &Summary::best_key, QUERIES, TO_KEYS},
                                  {"values", &Summary::values, LARGEST, TO_ROWS},
                                  {"indices", &Summary::indices, LARGEST, TO_KEY_ROWS},
                                  {"scores", &Summary::scores, LARGEST, TO_ROWS},
                                  {"received", &Summary::received, KEYS, TO_ROWS},
                                  {"mean", &Summary::mean, CELLS, TO_ROWS},
                                  {"peak", &Summary::peak, CELLS, TO_ROWS},
                                  {"factors", &Summary::factors, QUERIES, PER_QUERY}});
        together("distance", "position"), together("best", "best_key"), together("best_key", "best");
        together("values", "indices"), together("indices", "values"), together("scores", "values");
        s.top = has("values") ? top : 0;
        if (s.top > p.keys) refuse("there are " + std::to_string(p.keys) + " keys, and " + std::to_string(top) + " largest weights.");
        return s;
    }
};

struct NamedSent : Named<Sent> {
    using Named::Named;

    Sent of(const Problem& p) const {
        Sent s = arrays_of(p, {{"log_weight", &Sent::log_weight, QUERIES, PER_QUERY},
                               {"distance", &Sent::distance, QUERIES, PER_QUERY},
                               {"position", &Sent::position, QUERIES, KEYS_PER_QUERY},
                               {"best", &Sent::best, QUERIES, PER_QUERY},
                               {"best_key", &Sent::best_key, QUERIES, KEYS_PER_QUERY},
                               {"values", &Sent::values, LARGEST, LISTED},
                               {"indices", &Sent::indices, LARGEST, LISTED_KEYS},
                               {"received", &Sent::received, KEYS, ALONG},
                               {"mean", &Sent::mean, CELLS, ALONG},
                               {"factors", &Sent::factors, QUERIES, PER_QUERY}});
        together("distance", "position"), together("best_key", "best");
        together("values", "indices"), together("indices", "values");
        s.k = top;
        return s;
    }
};

// The kernels of one instruction set. They run without the GIL: other Python threads run on.
struct Cpu {
    const Kernels* kernels = nullptr;
    std::string name;

    explicit Cpu(const std::string& isa) : name(isa) {
        for (const Build& build : BUILDS)
            if (build.name == isa && build.level <= level_of_cpu()) kernels = build.kernels;
        if (!kernels) throw nb::value_error("this CPU or this build has no such instruction set; see available()");
    }

    bool forward(const Held& held, bool few, nb::handle out, nb::handle maximum, nb::handle log_sum) const {
        const Problem p = held.to(out, held.problem.value_width, maximum, log_sum);
        require_value(held, out);
        // a tile of `decode` holds all queries that share a key head
        require(!few || p.groups() * p.queries <= ROWS, "these are more than a few queries.");
        nb::gil_scoped_release release;
        if (few) return kernels->decode(p, Workspace(kernels->decode_floats(p)).data());
        return kernels->forward(p, Workspace(kernels->forward_floats(p)).data());
    }
    void merge(const Held& held, nb::handle out, nb::handle maximum, nb::handle log_sum) const {
        Problem p = held.to(out, held.problem.value_width, maximum, log_sum);
        require_value(held, out);
        require(!maximum.is_none(), "maximum and log_sum are missing.");
        p.merges = true;
        nb::gil_scoped_release release;
        kernels->forward(p, Workspace(kernels->forward_floats(p)).data());
    }
    void backward(const Held& held, nb::handle grad, nb::handle maximum, nb::handle log_sum, nb::handle delta,
                  nb::handle query, nb::handle key, nb::handle value, nb::handle weight, nb::handle dense,
                  nb::handle relative, const NamedSent* sent, bool adds) const {
        const Problem& p = held.problem;
        Gradients g = upstream(held, grad, maximum, log_sum, sent);
        g.delta = Given(delta, "delta", PER_QUERY, {p.batch, p.heads, p.queries});
        g.query = Given(query, "the query's gradient", TO_ROWS, {p.batch, p.heads, p.queries, p.width});
        g.key = Given(key, "the key's gradient", TO_ROWS, {p.batch, p.key_heads, p.keys, p.width});
        g.value = Given(value, "the value's gradient", TO_ROWS, {p.batch, p.key_heads, p.keys, p.value_width});
        g.weight = Given(weight, "the weight's gradient", TO_ALL, {p.width});
        require(!query.is_none() && !key.is_none() && (!value.is_none() || !p.value_width),
                "the gradients of query, key and value are written to where these are.");
        const Given to_dense = as(held.dense, dense, "the dense bias's gradient");
        const Given to_relative = as(held.relative, relative, "the relative bias's gradient");
        g.dense = to_dense, g.relative = to_relative;
        g.dense_size = to_dense.size(), g.relative_size = to_relative.size();
        g.adds = adds;
        nb::gil_scoped_release release;
        kernels->backward(p, g, Workspace(kernels->backward_floats(p, g)).data());
    }
    void contributions(const Held& held, nb::handle grad, nb::handle maximum, nb::handle log_sum, const NamedSent* sent,
                       nb::handle by_query, nb::handle by_key, bool positive) const {
        const Problem& p = held.problem;
        Gradients g = upstream(held, grad, maximum, log_sum, sent);
        g.by_query = Given(by_query, "the sums by query", TO_NUMBERS, {p.batch, p.heads, p.queries});
        g.by_key = Given(by_key, "the sums by key", TO_ROWS, {p.batch, p.heads, p.keys});
        g.positive = positive;
        nb::gil_scoped_release release;
        kernels->contributions(p, g, Workspace(kernels->contributions_floats(p, g)).data());
    }
    bool summarise(const Held& held, nb::handle out, nb::handle maximum, nb::handle log_sum, const NamedSummary& named) const {
        const Problem p = held.to(out, held.problem.value_width, maximum, log_sum);
        const Summary summary = named.of(p);
        nb::gil_scoped_release release;
        return kernels->summarise(p, summary, Workspace(kernels->summary_floats(p, summary)).data());
    }
    void scores(const Held& held, nb::handle out) const {
        const Problem p = held.to(out, held.problem.keys, nb::none(), nb::none());
        require(!out.is_none(), "there is no array for the scores.");
        nb::gil_scoped_release release;
        kernels->scores(p, Workspace(kernels->scores_floats(p)).data());
    }
    int64_t forward_bytes(const Held& held, bool few) const {
        return 4 * (few ? kernels->decode_floats : kernels->forward_floats)(held.problem);
    }

  private:
    static void require_value(const Held& held, nb::handle out) {
        require(held.problem.value || !held.problem.value_width || !held.problem.keys, "the value has no memory.");
        require(!out.is_none() && !held.tensors[2].is_none(), "the value or the output is missing.");
    }
    // The numbers of each query that a backward pass reads.
    static Gradients upstream(const Held& held, nb::handle grad, nb::handle maximum, nb::handle log_sum, const NamedSent* sent) {
        const Problem& p = held.problem;
        Gradients g;
        g.grad = Given(grad, "the output's gradient", ROWS_OF, {p.batch, p.heads, p.queries, p.value_width});
        require(!p.value_width || !grad.is_none(), "the output's gradient is missing.");
        g.maximum = Given(maximum, "maximum", PER_QUERY, {p.batch, p.heads, p.queries});
        g.log_sum = Given(log_sum, "log_sum", PER_QUERY, {p.batch, p.heads, p.queries});
        if (sent) g.sent = sent->of(p);
        return g;
    }
    // A gradient of a bias's shape.
    static Given as(const Given& bias, nb::handle tensor, const char* name) {
        Given found(tensor, name);
        if (!found.there()) return found;
        if (!bias.there()) refuse(std::string(name) + " is given, and there is no such bias.");
        found.check(tensor, name, TO_ALL, bias.sizes, bias.count);
        return found;
    }
};

}  // namespace

NB_MODULE(_kernels, m) {
    nb::set_leak_warnings(false);  // compiled code of torch's may hold these objects until the process ends
    const auto number = nb::arg(), tensor = nb::arg();
    const auto maybe = nb::arg().none();  // a tensor or None
    nb::class_<Blocks>(m, "Blocks")
        .def("__init__",
             [](Blocks* blocks, int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
                 require(batch >= 0 && heads >= 0 && queries >= 0 && keys >= 0, "a map of blocks has sizes of 0 or more.");
                 new (blocks) Blocks(batch, heads, queries, keys);
             })
        .def("add",
             [](Blocks& blocks, nb::handle start, nb::handle stop, nb::handle gap_start, nb::handle gap_stop, nb::handle keep,
                int64_t first_key, int64_t last_key, int64_t first, int64_t last) {
                 const int64_t b = blocks.batch, h = blocks.heads, q = blocks.queries;
                 require(first >= 0 && first % ROWS == 0 && first <= last && last <= q, "these are no tiles of the mask.");
                 const bool panels = first_key >= 0 && first_key % PANEL == 0 && first_key <= last_key && last_key <= blocks.keys;
                 require(panels && (last_key % PANEL == 0 || last_key == blocks.keys), "these are no panels of the mask.");
                 const Gaps gaps(gap_start, gap_stop, b, h, q);
                 blocks.add(Given(start, "the start of the spans", EDGES, {b, h, q}), Given(stop, "the stop of the spans", EDGES, {b, h, q}),
                            gaps.start, gaps.stop, gaps.count,
                            Given(keep, "the residual", KEPT, {b, h, last - first, last_key - first_key}), first_key, last_key, first, last);
             },
             tensor, tensor, maybe, maybe, maybe, number, number, number, number)
        .def_ro("batch", &Blocks::batch)
        .def_ro("heads", &Blocks::heads)
        .def_prop_ro("pairs", &Blocks::pairs)
        .def_prop_ro("bytes", &Blocks::bytes);
    nb::class_<Held>(m, "Problem")
        .def(nb::init<int64_t, double, double, int64_t, nb::object, nb::object, nb::object, nb::object, nb::object,
                      nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                      nb::object, double, uint64_t, int64_t>(),
             number, number, number, number, tensor, tensor, maybe, maybe, maybe, maybe, maybe, maybe, maybe, maybe, maybe,
             maybe, maybe, maybe, number, number, number);
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
#define CLEARHEAD_PHI(PHI, NAME, SCORE) NAME,
    m.def("phis", [] { return std::vector<std::string>{CLEARHEAD_PHIS(CLEARHEAD_PHI)}; });
#undef CLEARHEAD_PHI
}
