"""What is said in the demo: an invented bicycle workshop, its notes, and eight turns with edits of the memory.

The facts are worded as the bundled model words its answers; it has 135 million parameters and is easily led astray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from .agent import Edit


@dataclass(frozen=True)
class ScriptedTurn:
    """One thing that the user says.

    Attributes:
        message: What is said.
        edits: What changes in the memory before.
    """

    message: str
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Script:
    """A conversation to hold.

    Attributes:
        instructions: The system message before the memory.
        memory: The facts at the start, one a line.
        history: What was said before the first turn.
        turns: What the user says, in order.
    """

    instructions: str
    memory: tuple[str, ...]
    history: Sequence[BaseMessage]
    turns: tuple[ScriptedTurn, ...]


_INSTRUCTIONS = (
    "You are the assistant of a bicycle workshop in the small harbour town of Ellerby. Answer every question in one "
    "short sentence, with the words of the memory or of the messages. The memory is brought up to date before every "
    "message: when it and an older message say different things, the memory is right."
)

_MEMORY = (
    "The workshop opens at nine o'clock.",
    "The landlord is Mister Finch.",
    "The price of a tube is six crowns.",
    "The next market is on Saturday.",
    "The password of the gate is hazel.",
    "The price of a bell is four crowns.",
    "The neighbour is Mister Amber.",
    "The next holiday is on Friday.",
)

_NOTES = """Here are my notes of this week, so that you know what goes on.

Monday. The harbour was foggy until noon and hardly anybody came in. I used the quiet to sort the drawers by the back \
door: brake pads on the left, cables in the middle, bells and reflectors on the right. In the afternoon the postwoman \
brought her cargo bike. The rear wheel has a broken spoke and the chain is worn to the limit. I told her it would be \
ready on Wednesday and lent her the old city bike until then. She paid for the last repair as well, so that her \
account is settled.

Tuesday. A family from the camping site rented four bicycles for two days and asked for the path along the cliffs. I \
drew it for them on the back of a receipt: past the lighthouse, down to the old mill, and home through the orchard. \
The smallest helmet was missing its buckle, so I gave them mine. The supplier called: the tyres for the touring bikes \
come a week late because their warehouse is being moved. I ordered tubes from the other supplier in the meantime, \
twelve of them, and wrote the price into my book.

Wednesday. The postwoman fetched her cargo bike and was glad. The new chain runs quietly. The school wants to know \
whether we could come in spring and show the children how to mend a flat tyre; I said yes and promised to bring ten \
old wheels for them to practise on. In the evening I oiled the big door, which has squeaked since the storm, and \
swept the yard.

Thursday. It rained and the roof over the wheel stand leaks again, in the same corner as last year. I put a bucket \
under it and called the roofer, who will come when the weather is better. A student brought a racing bike that he had \
found in his grandmother's barn. The frame is sound, but the tyres crumble, the gears are stuck and a mouse has lived \
in the saddle bag. We agreed that I will make a list of what it needs before he decides. Two tourists bought bells, \
the loud ones made of brass, and rang them all the way down to the harbour.

Friday. The list for the racing bike is done: two tyres, two tubes, one chain, a set of cables, new tape for the \
handlebar and about five hours of work. I wrote it on a card and pinned it over the bench. The family from the camping \
site came back with the four bicycles, sandy but whole, and gave my helmet back with a bag of cherries in it. At five \
I closed, counted the money and cleaned the windows. Next week I want to paint the sign over the door, because nobody \
can read it any more from the other side of the street."""

_LEAFLET = """And here is how we rent bicycles, for the new leaflet. Please keep it too.

A bicycle is rented by the day or by the week. A day begins when we open and ends when we close; whoever comes back \
later pays for the next day as well, unless a storm or a puncture is to blame. City bikes cost ten crowns a day, \
touring bikes fifteen and the tandem twenty-two. Children ride at half the price. A helmet, a lock and a map of the \
coast are part of every rental, and so is a small bag with a tube, two levers and a pump. Who does not know how to \
mend a tyre is shown it before leaving, which takes five minutes and saves many telephone calls.

We ask for a deposit of fifty crowns, or for something that the guest will surely come back for. Scratches are part \
of a bicycle's life and cost nothing. A lost lock costs eight crowns. When a bicycle breaks down on the way, the guest \
calls us, says which milestone is nearest, and waits there: one of us comes with a spare one. Bicycles stay off the \
beach, because salt and sand ruin the chain, and out of the water, for the same reason. Dogs ride in the trailer, \
never in the basket. On market days the square is closed and guests walk their bicycles through it.

In winter we rent out only on fine days. Then we also sharpen skates, mend sledges and repair the bicycles of the \
school, for which the town pays us in spring."""

_HISTORY = (
    HumanMessage(_NOTES),
    AIMessage("Thank you, Mara. I have read your notes of this week and will keep them in mind."),
    HumanMessage(_LEAFLET),
    AIMessage("I have kept the text for the leaflet."),
    HumanMessage("Who is the landlord?"),
    AIMessage("The landlord is Mister Finch."),
    HumanMessage("What is the password of the gate?"),
    AIMessage("The password of the gate is hazel."),
    HumanMessage("What is the price of a bell?"),
    AIMessage("The price of a bell is four crowns."),
)

_TURNS = (
    ScriptedTurn("When does the workshop open?"),
    ScriptedTurn("What is the password of the radio?", (Edit(new="The password of the radio is walnut."),)),
    ScriptedTurn(
        "When is the next market?",
        (Edit("The next market is on Saturday.", "The next market is on Monday."),),
    ),
    ScriptedTurn(
        "Who is the accountant?",
        (Edit(old="The password of the gate is hazel."), Edit(new="The accountant is Mister Bell.")),
    ),
    ScriptedTurn(
        "What is the price of a tube?",
        (Edit("The price of a tube is six crowns.", "The price of a tube is eight crowns."),),
    ),
    ScriptedTurn("Who is the plumber?", (Edit(new="The plumber is Mister Rowan."),)),
    ScriptedTurn("When is the next holiday?"),
    ScriptedTurn(
        "Who is the neighbour?",
        (Edit("The neighbour is Mister Amber.", "The neighbour is Mister Winter."),),
    ),
)

WORKSHOP = Script(_INSTRUCTIONS, _MEMORY, _HISTORY, _TURNS)
"""The conversation that `cacheslide demo` holds."""
