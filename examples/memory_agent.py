"""An agent that keeps a memory block in its system message and rewrites it between turns.

    python examples/memory_agent.py

Everything behind the block keeps its keys and values; the last column says how many prompt tokens were not computed.
"""

from __future__ import annotations

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from cacheslide_agents import CacheSlideChat

INSTRUCTIONS = "You are Ann's travel assistant. Answer in one sentence and respect what you know about her.\n"

TURNS = [
    (["Ann lives in Ghent."], "I would like to see the sea this weekend. Where should I go, and why there?"),
    (["Ann lives in Ghent.", "Ann does not drive."], "How do I get there in the morning?"),
    (["Ann lives in Ghent.", "Ann does not drive.", "Ann is vegetarian."], "Where can I eat when I arrive?"),
    (["Ann has moved to Brussels.", "Ann does not drive.", "Ann is vegetarian."], "And how do I get home again?"),
]


def system_message(memory: list[str]) -> SystemMessage:
    """The instructions, which never change, and the memory block, which does."""
    block = "Memory:\n" + "\n".join(f"- {line}" for line in memory)
    return SystemMessage(
        [{"type": "text", "text": INSTRUCTIONS}, {"type": "text", "text": block, "cacheslide": "update"}]
    )


def main() -> None:
    """Holds the conversation and prints each answer with its receipt's counts."""
    chat = CacheSlideChat(max_tokens=48)
    history: list[BaseMessage] = []
    for memory, question in TURNS:
        history.append(HumanMessage(question))
        answer = chat.invoke([system_message(memory), *history], {"configurable": {"thread_id": "ann"}})
        history.append(answer)
        receipt = answer.response_metadata["cacheslide"]
        print(f"> {question}\n{answer.text}")
        print(f"[{receipt['cache_read_tokens']} of {receipt['prompt_tokens']} prompt tokens reused]\n")


if __name__ == "__main__":
    main()
