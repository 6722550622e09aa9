// A tensor from Python as an array. Its element type, sizes and layout are compared with those of the problem before
// a kernel is given its address: in O(1), whoever made it.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "problem.h"

namespace clearhead {

namespace nb = nanobind;

// The types of an array's numbers. The first ones are those of `Element`; OPERAND stands for any of these.
enum Type : int { FLOAT = FLOAT32, INT64 = 3, BOOL = 4, OPERAND = 5 };

// Names and objects of Python, looked up once. They live as long as the process.
struct Known {
    PyObject *shape, *stride, *data_ptr, *dtype, *is_cpu;
    PyObject* types[5];  // in the order of `Type`

    Known() {
        shape = PyUnicode_InternFromString("shape"), stride = PyUnicode_InternFromString("stride");
        data_ptr = PyUnicode_InternFromString("data_ptr"), dtype = PyUnicode_InternFromString("dtype");
        is_cpu = PyUnicode_InternFromString("is_cpu");
        const nb::object torch = nb::module_::import_("torch");
        const char* names[] = {"float32", "bfloat16", "float16", "int64", "bool"};
        for (int i = 0; i < 5; i++) types[i] = nb::object(torch.attr(names[i])).release().ptr();
    }
    static const Known& get() {
        static const Known* known = new Known;
        return *known;
    }
};

// Raises a ShapeError.
[[noreturn]] inline void refuse(const std::string& why) {
    const nb::object error = nb::module_::import_("clearhead.base.errors").attr("ShapeError");
    PyErr_SetString(error.ptr(), ("the kernels read memory as a problem's sizes say, and " + why).c_str());
    throw nb::python_error();
}

// The text of an object, by Python's `str`.
inline std::string said(nb::handle object) {
    return nb::str(object).c_str();
}

inline void require(bool right, const char* why) {
    if (!right) refuse(why);
}

// The properties of an array that a kernel relies on.
struct Expected {
    Type type = FLOAT;
    int free = 0;               // so many first dimensions may have size 1 instead: they broadcast
    bool side_by_side = false;  // the last dimension has stride 1
    bool written = false;       // no two of its numbers share memory
    bool contiguous = false;
};

constexpr Expected ANY{OPERAND, 4}, EDGES{INT64, 3}, KEPT{BOOL, 4}, VECTOR{}, ROWS_OF{OPERAND, 0, true};
constexpr Expected ALONG{FLOAT, 2, true}, PER_QUERY{FLOAT, 3}, KEYS_PER_QUERY{INT64, 3}, LISTED{FLOAT, 3, true};
constexpr Expected LISTED_KEYS{INT64, 3, true}, TO_NUMBERS{FLOAT, 0, false, true}, TO_KEYS{INT64, 0, false, true};
constexpr Expected TO_ROWS{FLOAT, 0, true, true}, TO_KEY_ROWS{INT64, 0, true, true}, TO_ALL{FLOAT, 0, false, true, true};

// An array from a tensor's data_ptr(), shape and stride(): a dimension of size 1 has stride 0. None: no array.
struct Given : Array {
    int64_t sizes[4] = {0, 0, 0, 0};
    int count = -1;  // of dimensions; none: there is no tensor

    Given() = default;
    // An array of the given sizes; without sizes, of up to four dimensions of any size, which `of` checks.
    Given(nb::handle tensor, const char* name, const Expected& expected, std::initializer_list<int64_t> wanted)
        : Given(tensor, name) {
        if (count >= 0) check(tensor, name, expected, wanted.begin(), (int)wanted.size());
    }
    // A tensor whose sizes say what the problem's are.
    Given(nb::handle tensor, const char* name) {
        if (tensor.is_none()) return;
        const Known& known = Known::get();
        const nb::object shape = nb::steal(need(PyObject_GetAttr(tensor.ptr(), known.shape)));
        const nb::object steps = called(tensor, known.stride), address = called(tensor, known.data_ptr);
        if (!PyTuple_Check(shape.ptr()) || !PyTuple_Check(steps.ptr())) refuse(std::string(name) + " is no tensor.");
        const Py_ssize_t dims = PyTuple_Size(shape.ptr());
        if (dims > 4 || PyTuple_Size(steps.ptr()) != dims)
            refuse(std::string(name) + " has shape " + said(shape) + ": four dimensions are the most.");
        count = (int)dims;
        for (int i = 0; i < count; i++) {
            sizes[i] = number(PyTuple_GetItem(shape.ptr(), i));
            strides[i] = sizes[i] == 1 ? 0 : number(PyTuple_GetItem(steps.ptr(), i));
        }
        data = reinterpret_cast<void*>(nb::cast<uintptr_t>(address));
        const nb::object here = nb::steal(need(PyObject_GetAttr(tensor.ptr(), known.is_cpu)));
        if (here.ptr() != Py_True || (!data && size()))
            refuse(std::string(name) + " " + said(shape) + " has no memory on the host.");
    }

    int64_t size() const {
        int64_t all = 1;
        for (int i = 0; i < count; i++) all *= sizes[i];
        return all;
    }
    bool there() const { return count >= 0; }
    bool same_sizes(const Given& other) const {
        return count == other.count && std::equal(sizes, sizes + std::max(count, 0), other.sizes);
    }

    void check(nb::handle tensor, const char* name, const Expected& expected, const int64_t* wanted, int dims) {
        const nb::object type = nb::steal(need(PyObject_GetAttr(tensor.ptr(), Known::get().dtype)));
        PyObject* const* types = Known::get().types;
        if (expected.type == OPERAND) element = type.ptr() == types[BFLOAT16] ? BFLOAT16 : type.ptr() == types[FLOAT16] ? FLOAT16 : FLOAT32;
        bool fits = count == dims && type.ptr() == types[expected.type == OPERAND ? (int)element : (int)expected.type];
        for (int i = 0; fits && i < dims; i++)
            fits = sizes[i] == wanted[i] || (i < expected.free && sizes[i] == 1);
        if (!fits) refuse_sizes(tensor, name, expected, wanted, dims);
        if (lies_right(expected)) return;
        refuse(std::string(name) + " " + shown(sizes, count) + " has strides " +
               said(nb::object(tensor.attr("stride")())) +
               (expected.contiguous ? ": it must be contiguous."
                                    : ": its last dimension must stand side by side, and no two of its numbers share memory."));
    }

  private:
    static PyObject* need(PyObject* found) {
        if (!found) throw nb::python_error();
        return found;
    }
    // What a method gives that is called without arguments.
    static nb::object called(nb::handle object, PyObject* method) {
        PyObject* const self[] = {object.ptr()};
        return nb::steal(need(PyObject_VectorcallMethod(method, self, 1, nullptr)));
    }
    static int64_t number(PyObject* object) {
        const int64_t found = PyLong_AsLongLong(object);
        if (found == -1 && PyErr_Occurred()) throw nb::python_error();
        return found;
    }
    static std::string shown(const int64_t* sizes, int count) {
        std::string text = "(";
        for (int i = 0; i < count; i++) text += (i ? ", " : "") + std::to_string(sizes[i]);
        return text + (count == 1 ? ",)" : ")");
    }

    int many() const {  // dimensions of more than one number
        int found = 0;
        for (int i = 0; i < count; i++) found += sizes[i] > 1;
        return found;
    }
    bool lies_right(const Expected& expected) const {
        if (!size()) return true;
        if (expected.side_by_side && count && sizes[count - 1] > 1 && strides[count - 1] != 1) return false;
        if (expected.contiguous) {
            int64_t step = 1;
            for (int i = count - 1; i >= 0; step *= sizes[i--])
                if (sizes[i] > 1 && strides[i] != step) return false;
        } else if (expected.written) {
            int64_t reach = 0;  // of the dimensions so far, from the innermost
            for (int done = 0, left = many(); left; left--) {
                int at = -1;
                for (int i = 0; i < count; i++)
                    if (!(done >> i & 1) && sizes[i] > 1 && (at < 0 || strides[i] < strides[at])) at = i;
                if (strides[at] <= reach) return false;
                reach += strides[at] * (sizes[at] - 1), done |= 1 << at;
            }
        }
        return true;
    }

    [[noreturn]] void refuse_sizes(nb::handle tensor, const char* name, const Expected& expected, const int64_t* wanted,
                                   int dims) const {
        PyObject* const* types = Known::get().types;
        const std::string type = expected.type == OPERAND ? said(types[FLOAT32]) + ", " + said(types[BFLOAT16]) + " or " + said(types[FLOAT16])
                                                          : said(types[expected.type]);
        std::string text = std::string(name) + " is " + shown(sizes, count) + " of " + said(nb::object(tensor.attr("dtype")));
        text += "; expected " + shown(wanted, dims) + " of " + type;
        if (expected.free >= dims) text += ", or sizes of 1 that broadcast to it";
        else if (expected.free) text += ", whose first " + std::to_string(expected.free) + " sizes may be 1";
        refuse(text + ".");
    }
};

}  // namespace clearhead
