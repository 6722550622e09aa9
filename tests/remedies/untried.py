"""Messages with a remedy that no case provokes, each with its own reason."""

UNTRIED = {
    "It needs a CUDA device on which a graph is captured, and here is the CPU alone": [
        "engines/proof.py: it was not proved on this device yet, and a CUDA graph is captured: call once before the capture",
        "engines/triton/launch.py: the kernel {} was not compiled yet for a call of this kind (dtypes, widths, lengths, mask), and a CU",
    ],
    "It ends the text of a diagnosis, no message: tests/diagnosis/test_shown.py": [
        "explanation/diagnosis/diagnosis.py: Not examined: {}. Use ch.audit.",
    ],
    "It is in a report of an audit, no message: tests/audits/test_audit.py follows it": [
        "models/audits/audited_model.py: dropout is on: call model.eval()",
        "models/audits/given.py: a mask of 0 and 1 that is added to the scores: pass floats, 0 and −inf, or a bool mask to sdpa.",
    ],
    "It asks for an answer to an exercise, which it does not know": [
        "exercises/answers.py: {}: not answered yet. Write your lines in place of the dots, or of None.",
    ],
    "It says what there is, and has no advice: 'call of' and 'read' are no verbs of one": [
        "models/edits/from_run.py: no call of {} ({}); it has {}",
        "models/causes/circuits.py: composition: heads of {} write {} numbers, and those of {} read their {} from {}, which are not the ",
    ],
}
