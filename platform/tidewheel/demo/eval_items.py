"""Invented questions for the demo's evaluation set. Everything in them is made up, so no text has them by chance."""

from __future__ import annotations

# (question, answer). The last six are shorter than 13 words together: plain 13-gram matching misses them.
QUESTIONS: tuple[tuple[str, str], ...] = (
    ("Which warden of the Harrowmere tide register was the first to number the spring floods by the moon that "
     "raised them?", "Odalind Verrick, in the ninth year of her wardenship."),
    ("A ferry on the Tolven crosses in eighteen minutes against the ebb and in eleven with it; how long does it "
     "wait at slack water?", "It does not wait, because the ferry only runs while the bell buoy is silent."),
    ("Why did the glassblowers of Quillan Strand refuse sand from the northern bar after the second lamp winter?",
     "The northern sand held iron from the wrecks and turned every lamp a murky green."),
    ("How many oars did the packet boat Marrowlight ship when it carried the salt treaty to Essenholm?",
     "Fourteen, two of them cut from the mast of its sister boat."),
    ("What did surveyor Ilse Brandtvig record as the cause of the double shadow on the Corrow lighthouse?",
     "A second lens, left uncovered by the night keeper, facing the quarry wall."),
    ("In the ledger game of nine harbours, what happens to a player who holds three anchors and no rope?",
     "The player drifts two harbours downstream and forfeits the smallest anchor."),
    ("Which herb do the reed cutters of Ansel Fen burn to keep the pale gnats from their lanterns in autumn?",
     "Dried water bell, gathered before the first frost and bound with red thread."),
    ("What was written on the back of the weather clock that Petra Solheim returned to the Dunmere guild?",
     "The words repaired twice, trusted once, in her grandfather's hand."),
    ("Explain why the canal horses of Orrin's Cut wore one white sock on the left foreleg and never on the right.",
     "The towpath runs on the left bank, and the white sock showed lock keepers the near horse at dusk."),
    ("Which of the four Kestrow bridges was built without a keystone, and what holds it up instead?",
     "The Lantern Bridge, held by the weight of the mill that stands on its crown."),
    ("How did the archivists of Velm date the undated letters of the oyster tax rebellion?",
     "By the thickness of the sealing wax, which was rationed more strictly every month."),
    ("When the snow bell rings twice in Upper Tarn, which road must the mail sledge leave to the cattle?",
     "The ridge road, because the valley road is closed to cattle after the first thaw."),
    ("What remedy did the physician Corvane Ashdell prescribe to bell ringers who could no longer hear the low "
     "notes?", "A month at sea, a diet of samphire, and ringing by counting the pull of the rope."),
    ("Who settled the quarrel between the mapmakers of Isenwold over the island that appears only at neap tide?",
     "The harbour cook, who rowed out with a kettle and came back with wet boots and a sketch."),
    ("In the Brackwater almanac, what weather follows a red dawn that comes after three silent nights?",
     "Wind from the south until noon, and then a calm that lasts for as many hours as there were clouds."),
    ("Which tool did the wheelwrights of Tidewater Rise lend to strangers but never to their own apprentices?",
     "The long gauge, since an apprentice was meant to learn the measure by eye."),
    ("What bird is painted on the door of the Merriden toll house?", "A plover with one open eye."),
    ("How deep is the Gallow Basin at low water?", "Seven fathoms and a hand."),
    ("Which month has no name in Tarnish?", "The month of thaw."),
    ("Who rang the drowned bell of Skerrow?", "Nobody ever did."),
    ("What colour is a Velmish mourning sail?", "Undyed, with yellow rope."),
    ("Where do the Ansel reed cutters sleep?", "In upturned boats."),
)
